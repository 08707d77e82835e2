"""vLLM's schedulers with the sieve's rules: free first, end chunks at the prompt, report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvsieve.core.config import CONFIG_KEY
from kvsieve.core.treatment import (
    Mode,
    Treatment,
    check_mode,
    requested_budget,
    requested_protection,
    requested_pruning,
    treat,
)
from kvsieve.engine.allocation import bind_decode_shortcut
from kvsieve.engine.manager import SievedManager
from kvsieve.engine.prefix_cache import bind_prefix_cache_rules
from kvsieve.engine.proof import Proof
from kvsieve.engine.pruning.carried import NUM_CARRIED
from kvsieve.engine.pruning.rule import PruningRule
from kvsieve.engine.requests import PlannedRequests
from kvsieve.engine.settings import sieve_config, sieve_policy
from kvsieve.engine.step_message import StepMessage, attach_message
from kvsieve.engine.tail_copies import TailCopies
from kvsieve.engine.windows import (
    OpenWindows,
    num_ring_slots,
    watched_queries,
)
from kvsieve.engine.worker_report import take_rows

logger = init_logger("vllm.kvsieve.scheduler")

COUNT_INTERVAL_S = 1.0
"""Seconds between counts of the blocks held, which visit every request in every group."""

_TICKET = "kvsieve_tail_copies"

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
        self._config = sieve_config(self.vllm_config)
        policy = sieve_policy(self.vllm_config)
        self._watched = watched_queries(policy)
        self._block_size = self.sieved_managers[0].spec.manager_block_size
        self._mode: Mode = self._config.mode
        self.planned = PlannedRequests(manager.spec for manager in self.sieved_managers)
        for manager in self.sieved_managers:
            manager.bind(self.planned)
        bind_prefix_cache_rules(self.kv_cache_manager, self.planned)
        bind_decode_shortcut(self.kv_cache_manager)
        layers = {"full": 0, "sieved": 0}
        of_tier: dict[Any, list[int]] = {}
        for group in self.kv_cache_config.kv_cache_groups:
            kind = "sieved" if group.kv_cache_spec in self.planned.tiers else "full"
            layers[kind] += len(group.layer_names)
            if kind == "sieved":
                numbers = map(extract_layer_index, group.layer_names)
                of_tier.setdefault(group.kv_cache_spec, []).extend(numbers)
        tiers = sorted(tuple(sorted(numbers)) for numbers in of_tier.values())
        self.proof = Proof(policy, layers, self.planned, self.sieved_managers, tiers)
        self.tail_copies = TailCopies(self.kv_cache_manager.block_pool, self.sieved_managers)
        self.windows = OpenWindows(
            num_ring_slots(
                self._config,
                policy,
                self._block_size,
                self.scheduler_config.max_num_batched_tokens,
                self.scheduler_config.max_num_seqs,
            )
        )
        self.pruning = PruningRule(self.vllm_config)
        self._carried = OpenWindows(NUM_CARRIED)
        # Sieved requests whose prompt was scheduled to its end and that were not freed yet.
        self._to_free: dict[str, Request] = {}
        # A stop string is found by the front end, which then forgets what the engine core
        # says last: such requests carry their report with every output.
        self._with_stop_strings: dict[str, Request] = {}
        self._next_count = 0.0
        self._log_capacity()

    def _log_capacity(self) -> None:
        """Say how many long requests fit; vLLM's own line knows nothing of the sieve."""
        longest = self.max_model_len
        managers = self.kv_cache_manager.coordinator.single_type_managers
        # The null block is never given to a request.
        pool = self.kv_cache_config.num_blocks - 1
        read = sum(cdiv(longest, manager.block_size) for manager in managers)
        freed = sum(m.spec.start(longest) // m.block_size for m in self.sieved_managers)
        logger.info(
            "kvsieve: a prompt of %d tokens needs %d blocks while it is read and %d once it is"
            " sieved; %.1f such requests fit in %d blocks",
            longest,
            read,
            read - freed,
            1 + (pool - read) / (read - freed),
            pool,
        )
        if self.pruning.is_on:
            logger.info("kvsieve: %s", self.pruning)

    @property
    def kvsieve_mode(self) -> Mode:
        """What is done to requests that arrive from now on."""
        return self._mode

    def set_kvsieve_mode(self, mode: str) -> Mode:
        """Change the mode. Requests that are here keep the treatment that they came with.

        Returns:
            The previous mode.

        Raises:
            ConfigError: There is no such mode.
        """
        previous, self._mode = self._mode, check_mode(mode)
        if self._mode != previous:
            logger.info("kvsieve: mode %s, before: %s", self._mode, previous)
        return previous

    def add_request(self, request: Request) -> None:
        """Take a request in: decide its treatment, note whether the front end may end it."""
        treatment = self._treatment(request)
        plan = self.planned.add(request.request_id, request.num_prompt_tokens, treatment)
        if plan.is_pruned and (objection := self.pruning.objection(request, plan)):
            self.planned.leave_unpruned(request.request_id, objection)
        self.proof.counters.add_request(treatment.mode)
        super().add_request(request)
        if request.sampling_params is not None and request.sampling_params.stop:
            self._with_stop_strings[request.request_id] = request

    def _treatment(self, request: Request) -> Treatment:
        extra_args = request.sampling_params and request.sampling_params.extra_args
        try:
            return treat(
                self._mode,
                self._config,
                requested_budget(extra_args),
                self._block_size,
                requested_protection(extra_args),
                request.num_prompt_tokens,
                requested_pruning(extra_args),
            )
        except ValueError as error:
            # The front end has checked it (`plugin.py`). If one did not, nobody else may suffer.
            logger.error("kvsieve: request %s keeps everything: %s", request.request_id, error)
            return Treatment("full")

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
                self.proof.count_freed(request_id)
                del self._to_free[request_id]
        self.windows.begin_schedule(self._is_running)
        self._carried.begin_schedule(self._is_running)
        for manager in self.sieved_managers:
            manager.published.clear()
        return super().schedule(*args, **kwargs)

    def _is_running(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status == RequestStatus.RUNNING

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        ending: list[Request] = []
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            after, prompt_tokens = request.num_computed_tokens, request.num_prompt_tokens
            if after - num_scheduled < prompt_tokens and self.pruning.reads_chunks(
                self.planned[request_id]
            ):
                self._carried.scheduled(request_id, is_complete=after >= prompt_tokens)
            if after - num_scheduled >= prompt_tokens or after <= prompt_tokens - self._watched:
                continue
            plan = self.planned[request_id]
            if plan.is_observed:
                self.windows.scheduled(request_id, is_complete=after >= prompt_tokens)
            if plan.is_sieved and after >= prompt_tokens:
                self._to_free[request_id] = request
                if not plan.is_pruned:
                    ending.append(request)
        message = StepMessage()
        for new in scheduler_output.scheduled_new_reqs:
            plan = self.planned[new.req_id]
            message.new_requests[new.req_id] = (plan.prompt_tokens, plan.treatment)
        if ending and self.kv_cache_manager.enable_caching:
            # Under asynchronous scheduling the next schedule comes before the copies are given
            # back, and may need a block in every group for every running request.
            reserved = len(self.running) * self.kv_cache_manager.num_kv_cache_groups
            ticket, copies = self.tail_copies.plan(ending, reserved)
            setattr(scheduler_output, _TICKET, ticket)
            message.tail_copies = [(c.source.block_id, c.copy.block_id) for c in copies]
        attach_message(scheduler_output, message)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk at the end of a sieved prompt, or before a window that has no slot.

        A prompt that is to be pruned gets no chunk but the whole of it.

        Only a request that was preempted while decoding has tokens beyond its prompt
        to prefill. Cutting its chunk there makes them see the sieved cache, as they
        did the first time, so that a recomputed request writes the same text.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        rest_of_prompt = request.num_prompt_tokens - num_computed_tokens
        if rest_of_prompt <= 0:
            return num_new_tokens
        plan = self.planned[request.request_id]
        if plan.is_sieved:
            num_new_tokens = min(num_new_tokens, rest_of_prompt)
        if plan.is_pruned and num_new_tokens < rest_of_prompt:
            if not self.pruning.reads_chunks(plan):
                # It is read whole or not at all: it waits, and with it all that came later.
                return 0
            # The last chunk must have room for all that goes on from it.
            num_new_tokens = min(num_new_tokens, max(plan.starts) - num_computed_tokens)
            if num_new_tokens <= 0 or not self._carried.claim(request.request_id):
                return 0
        before_window = max(0, rest_of_prompt - self._watched)
        if (
            plan.is_observed
            and num_new_tokens > before_window
            and not self.windows.claim(request.request_id)
        ):
            if not plan.is_pruned:
                return before_window
            # Where the chunk would end, its last one may no longer have room for what goes on.
            is_cut_here = self.pruning.reads_chunks(plan) and num_new_tokens < rest_of_prompt
            return min(before_window, num_new_tokens) if is_cut_here else 0
        return num_new_tokens

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Keep the worker's counts of this step and publish its copies, then process it."""
        for request_id, row in take_rows(model_runner_output).items():
            if request_id in self.requests:
                self.proof.keep(request_id, row)
        if ticket := getattr(scheduler_output, _TICKET, None):
            self.tail_copies.publish(ticket)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._with_stop_strings:
            self._report_early(outputs)
        self.proof.log()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Statistics of a step as stock, with our counters in a field that is free here.

        The statistics go to the process that serves `/metrics`, where
        `frontend/metrics.py` takes our entry out again. KV connectors are refused.
        """
        stats = super().make_stats(*args, **kwargs)
        counters = self.proof.counters
        if stats is None:
            # Nobody asks, and the lists of shares must not grow for ever.
            counters.take()
            return None
        counters.mode = self._mode
        now = time.monotonic()
        # An engine that falls idle makes no more statistics: its last ones must be right.
        if now >= self._next_count or not self.running:
            self._next_count = now + COUNT_INTERVAL_S
            counters.blocks_held = self._blocks_held()
            # The null block is never given to a request.
            counters.pool_blocks = self.kv_cache_config.num_blocks - 1
        if taken := counters.take():
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), CONFIG_KEY: taken}
        return stats

    def _blocks_held(self) -> dict[str, int]:
        """Blocks in the tables of all requests, by layer class; shared ones count each time."""
        held = {"full": 0, "sieved": 0}
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            kind = "sieved" if isinstance(manager, SievedManager) else "full"
            held[kind] += sum(map(len, manager.req_to_blocks.values()))
        held["sieved"] -= sum(manager.num_null_blocks for manager in self.sieved_managers)
        return held

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache; what is about to be published to it would be stale."""
        self.tail_copies.drop()
        return super().reset_prefix_cache(*args, **kwargs)

    def _report_early(self, outputs: Any) -> None:
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                request = self._with_stop_strings.get(output.request_id)
                if request is not None:
                    output.kv_transfer_params = {
                        **(output.kv_transfer_params or {}),
                        CONFIG_KEY: self.proof.report(request).as_dict(),
                    }

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        report = self.proof.finish(request)
        self._to_free.pop(request_id, None)
        self._with_stop_strings.pop(request_id, None)
        kv_transfer_params, *rest = super()._free_request(request, *args, **kwargs)
        self.planned.forget([request_id])
        # The one field of a response that vLLM passes from the engine core to its
        # clients as it is.
        return ({**(kv_transfer_params or {}), CONFIG_KEY: report.as_dict()}, *rest)


class SieveScheduler(SieveSchedulerMixin, Scheduler):
    """The synchronous scheduler with the sieve's rules."""


class SieveAsyncScheduler(SieveSchedulerMixin, AsyncScheduler):
    """The asynchronous scheduler with the sieve's rules."""
