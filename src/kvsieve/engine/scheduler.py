"""vLLM's schedulers with the sieve's rules: free first, end chunks at the prompt, report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvsieve.core.config import CONFIG_KEY, SieveConfig
from kvsieve.core.report import SieveReport, SieveTotals
from kvsieve.engine.allocation import bind_decode_shortcut
from kvsieve.engine.manager import SievedManager
from kvsieve.engine.prefix_cache import bind_prefix_cache_rules
from kvsieve.engine.worker_report import SievedRow, take_rows

logger = init_logger("vllm.kvsieve.scheduler")

LOG_INTERVAL_S = 10.0
"""Seconds between counter lines in the log, while requests finish."""


# A mixin's methods call those of the class beside it, which only the checker must know.
if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class SieveSchedulerMixin(_Base):
    """Rules that hold over any vLLM scheduler. Placed before it in the class's bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sieved_managers = tuple(
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, SievedManager)
        )
        self.sieved_specs = tuple(dict.fromkeys(m.spec for m in self.sieved_managers))
        bind_prefix_cache_rules(self.kv_cache_manager, self.sieved_specs)
        bind_decode_shortcut(self.kv_cache_manager)
        self._policy = SieveConfig.parse(self.vllm_config.additional_config[CONFIG_KEY]).policy
        self._layers = {"full": 0, "sieved": 0}
        for group in self.kv_cache_config.kv_cache_groups:
            kind = "sieved" if group.kv_cache_spec in self.sieved_specs else "full"
            self._layers[kind] += len(group.layer_names)
        # Requests whose prompt was scheduled to its end and not freed yet.
        self._to_free: dict[str, Request] = {}
        self._rows: dict[str, SievedRow] = {}
        # A stop string is found by the front end, which then forgets what the engine core
        # says last: such requests carry their report with every output.
        self._with_stop_strings: dict[str, Request] = {}
        self._totals = SieveTotals()
        self._next_log = 0.0
        self._log_capacity()

    def _log_capacity(self) -> None:
        """Say how many long requests fit; vLLM's own line knows nothing of the sieve."""
        longest = self.max_model_len
        managers = self.kv_cache_manager.coordinator.single_type_managers
        read = sum(cdiv(longest, manager.block_size) for manager in managers)
        freed = sum(m.spec.start(longest) // m.block_size for m in self.sieved_managers)
        logger.info(
            "kvsieve: a prompt of %d tokens needs %d blocks while it is read and %d once it is"
            " sieved; %.1f such requests fit in %d blocks",
            longest,
            read,
            read - freed,
            1 + (self.kv_cache_config.num_blocks - read) / (read - freed),
            self.kv_cache_config.num_blocks,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, after freeing what the processed steps have sieved.

        vLLM frees row by row while it allocates, in running order, so an early row
        could preempt the very request whose blocks would have sufficed.
        """
        for request_id, request in list(self._to_free.items()):
            if request.status != RequestStatus.RUNNING:
                del self._to_free[request_id]
                continue
            processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            if processed >= request.num_prompt_tokens:
                self.kv_cache_manager.remove_skipped_blocks(
                    request_id, processed, request.num_prompt_tokens
                )
                del self._to_free[request_id]
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            before = request.num_computed_tokens - num_scheduled
            if before < request.num_prompt_tokens <= request.num_computed_tokens:
                self._to_free[request_id] = request

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk at the end of a sieved prompt.

        Only a request that was preempted while decoding has tokens beyond its prompt
        to prefill. Cutting its chunk there makes them see the sieved cache, as they
        did the first time, so that a recomputed request writes the same text.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        rest_of_prompt = request.num_prompt_tokens - num_computed_tokens
        if 0 < rest_of_prompt < num_new_tokens and any(
            spec.start(request.num_prompt_tokens) for spec in self.sieved_specs
        ):
            return rest_of_prompt
        return num_new_tokens

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Keep the worker's counts of this step, then process it."""
        for request_id, row in take_rows(model_runner_output).items():
            if request_id in self.requests:
                self._rows[request_id] = row
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._with_stop_strings:
            self._report_early(outputs)
        if self._totals.requests and time.monotonic() >= self._next_log:
            logger.info("kvsieve: %s", self._totals)
            self._totals = SieveTotals()
            self._next_log = time.monotonic() + LOG_INTERVAL_S
        return outputs

    def add_request(self, request: Request) -> None:
        """Take a request in, and note whether the front end may end it."""
        super().add_request(request)
        if request.sampling_params is not None and request.sampling_params.stop:
            self._with_stop_strings[request.request_id] = request

    def _report_early(self, outputs: Any) -> None:
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                request = self._with_stop_strings.get(output.request_id)
                if request is not None:
                    output.kv_transfer_params = {
                        **(output.kv_transfer_params or {}),
                        CONFIG_KEY: self._report(request).as_dict(),
                    }

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        report = self._report(request)
        row = self._rows.pop(request_id, None)
        self._totals.add(report, seconds=row.seconds if row else 0.0)
        self._to_free.pop(request_id, None)
        self._with_stop_strings.pop(request_id, None)
        kv_transfer_params, *rest = super()._free_request(request, *args, **kwargs)
        # The one field of a response that vLLM passes from the engine core to its
        # clients as it is.
        return ({**(kv_transfer_params or {}), CONFIG_KEY: report.as_dict()}, *rest)

    def _report(self, request: Request) -> SieveReport:
        row = self._rows.get(request.request_id)
        prompt_tokens = request.num_prompt_tokens
        report = SieveReport(
            policy=self._policy,
            sieved=row is not None,
            prompt_tokens=prompt_tokens,
            stored_tokens=dict.fromkeys(self._layers, prompt_tokens),
            layers=self._layers,
        )
        if row is not None:
            report.stored_tokens["sieved"] = row.stored_tokens
            report.dropped_tokens = (row.prompt_tokens - row.stored_tokens) * row.num_layers
            report.blocks_freed = sum(
                manager.num_freed_blocks(request.request_id) for manager in self.sieved_managers
            )
        return report


class SieveScheduler(SieveSchedulerMixin, Scheduler):
    """The synchronous scheduler with the sieve's rules."""


class SieveAsyncScheduler(SieveSchedulerMixin, AsyncScheduler):
    """The asynchronous scheduler with the sieve's rules."""
