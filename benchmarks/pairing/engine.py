"""The arm's side: one vLLM engine in this process, stepped by hand and metered."""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from pairing.meter import Meter, cpu_meter, host_meter
from pairing.records import RequestRecord, StepRecord
from pairing.spec import ArmSpec

Until = Literal["idle", "decoding", "finished"]


def serve(pipe: Connection, spec: ArmSpec, log: str) -> None:
    """Body of an arm's process: start the engine, then answer calls until told to end."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    try:
        arm = EngineArm(spec)
        pipe.send((True, arm.describe()))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    while (call := _next_call(pipe)) is not None:
        method, args, kwargs = call
        try:
            pipe.send((True, getattr(arm, method)(*args, **kwargs)))
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            pipe.send((False, f"{method}: {type(error).__name__}: {error}"))


def _next_call(pipe: Connection) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    try:
        return pipe.recv()
    except EOFError:
        return None  # The parent is gone.


class EngineArm:
    """A vLLM engine that is stepped by hand.

    Args:
        spec: What to run.
    """

    def __init__(self, spec: ArmSpec) -> None:
        from vllm import LLM

        self.spec = spec
        self.llm = LLM(**spec.engine_arguments())
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self._last_schedule: Any = None
        self._blocks_after_schedule = 0
        self._watch_schedule()
        # The pages of a fresh pool are faulted in by whoever touches them first; do it now.
        for cache in self.runner.kv_caches:
            cache.zero_()
        self._num_submitted = 0
        self._submitted_at: dict[str, tuple[float, float]] = {}
        self._first_token: dict[str, tuple[float, float]] = {}
        self._finished: list[RequestRecord] = []

    def _watch_schedule(self) -> None:
        stock_schedule = self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            self._last_schedule = stock_schedule(*args, **kwargs)
            self._blocks_after_schedule = self.num_blocks_out()
            return self._last_schedule

        self.scheduler.schedule = schedule

    def describe(self) -> dict[str, Any]:
        """Facts of the started engine: pool, groups, threads, scheduler."""
        import torch

        pool = self.scheduler.kv_cache_manager.block_pool
        config = self.scheduler.kv_cache_config
        groups = config.kv_cache_groups
        page_bytes = max(group.kv_cache_spec.page_size_bytes for group in groups)
        return {
            "scheduler": type(self.scheduler).__name__,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__name__}",
            "groups": [
                {"layers": len(group.layer_names), "kind": type(group.kv_cache_spec).__name__}
                for group in groups
            ],
            "num_blocks": pool.num_gpu_blocks,
            # A block is a page for each layer of the largest group: groups share the pool.
            "block_bytes": max(len(group.layer_names) for group in groups) * page_bytes,
            "block_size": self.llm.llm_engine.vllm_config.cache_config.block_size,
            "max_num_batched_tokens": (
                self.engine.vllm_config.scheduler_config.max_num_batched_tokens
            ),
            "threads": torch.get_num_threads(),
        }

    def submit(
        self,
        prompts: Sequence[list[int]],
        output_tokens: Sequence[int],
        end_token: bool = True,
        extra_args: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue greedy requests with fixed output lengths; returns their ids.

        Args:
            prompts: Token ids.
            output_tokens: Tokens to generate, by prompt.
            end_token: Whether an answer may hold the token that would end it. Text that
                goes into a conversation must not.
            extra_args: What the requests ask of kvsieve.
        """
        from vllm import SamplingParams

        ids = []
        for prompt, length in zip(prompts, output_tokens, strict=True):
            self._num_submitted += 1
            request_id = f"r{self._num_submitted}"
            self._submitted_at[request_id] = (time.process_time(), time.perf_counter())
            self.engine.add_request(
                request_id,
                {"prompt_token_ids": prompt},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=length,
                    min_tokens=0 if end_token else length,
                    ignore_eos=end_token,
                    extra_args=extra_args,
                ),
            )
            ids.append(request_id)
        return ids

    def steps(self, limit: int | None = None, until: Until = "idle") -> list[StepRecord]:
        """Step the engine.

        Args:
            limit: Most steps to take.
            until: Stop when no request is left ("idle"), when every request has its first
                token and none waits ("decoding"), or as soon as one has ended ("finished").
        """
        records: list[StepRecord] = []
        while self.engine.has_unfinished_requests() and (limit is None or len(records) < limit):
            if until == "decoding" and self.is_decoding():
                break
            if until == "finished" and self._finished:
                break
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = self.engine.step()
            cpu_after, wall_after = time.process_time(), time.perf_counter()
            records.append(self._record(cpu_after - cpu, wall_after - wall))
            for output in outputs:
                self._note(output, cpu_after, wall_after)
        return records

    def is_decoding(self) -> bool:
        """Whether every request is running and past its prompt."""
        return not self.scheduler.waiting and all(
            request.num_computed_tokens >= request.num_prompt_tokens
            for request in self.scheduler.running
        )

    def _record(self, cpu: float, wall: float) -> StepRecord:
        scheduled = self._last_schedule
        prompt_tokens = decode_tokens = 0
        for count in scheduled.num_scheduled_tokens.values():
            if count > 1:
                prompt_tokens += count
            else:
                # A prompt's last chunk of one token counts as a decode, too: it costs as much.
                decode_tokens += 1
        return StepRecord(
            cpu=cpu,
            wall=wall,
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            running=len(scheduled.num_scheduled_tokens),
            preempted=len(scheduled.preempted_req_ids or ()),
            blocks_held=self._blocks_after_schedule,
        )

    def _note(self, output: Any, cpu: float, wall: float) -> None:
        cpu_submitted, wall_submitted = self._submitted_at[output.request_id]
        now = (cpu - cpu_submitted, wall - wall_submitted)
        if output.outputs[0].token_ids:
            self._first_token.setdefault(output.request_id, now)
        if output.finished:
            first = self._first_token.pop(output.request_id)
            del self._submitted_at[output.request_id]
            self._finished.append(
                RequestRecord(
                    request_id=output.request_id,
                    token_ids=list(output.outputs[0].token_ids),
                    report=(output.kv_transfer_params or {}).get("kvsieve"),
                    first_token_cpu=first[0],
                    first_token_wall=first[1],
                    last_token_cpu=now[0],
                    last_token_wall=now[1],
                    prompt_tokens=len(output.prompt_token_ids),
                    cached_tokens=output.num_cached_tokens or 0,
                )
            )

    def take_finished(self) -> list[RequestRecord]:
        """Requests that finished since the last call, in the order of their submission."""
        finished, self._finished = self._finished, []
        return sorted(finished, key=lambda record: int(record.request_id[1:]))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache.

        Raises:
            RuntimeError: vLLM would not, because a block is still in use.
        """
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be emptied: a block is in use")

    def abort_all(self) -> None:
        """Abort every request and step once, so that the worker forgets them too."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        self.core.abort_requests([request.request_id for request in requests])
        self.engine.output_processor.abort_requests(
            [request.request_id for request in requests], internal=True
        )
        self.engine.step()
        self._submitted_at.clear()
        self._first_token.clear()

    def num_blocks_out(self) -> int:
        """Blocks out of the pool; 0 while no request is alive, or blocks have leaked."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def sieve_steps(self) -> tuple[list[StepRecord], dict[str, float]]:
        """Step until idle, metering the sieve.

        Returns:
            The steps, and CPU seconds of `end_step` (scoring and compaction), of `observe`
            (copying the window's queries), of `gather` (looking at every query) and of
            `enter_group` (planning), with the worker's own wall-clock timer as `worker_wall`.
        """
        sieve = self.worker.sieve
        meter = cpu_meter()
        for method in ("end_step", "observe", "gather", "enter_group"):
            meter.wrap(sieve, method, method)
        worker_wall = 0.0
        stock_take = sieve.take_finished

        def take_finished() -> Any:
            nonlocal worker_wall
            rows = stock_take()
            worker_wall += sum(row.seconds for row in rows.values())
            return rows

        sieve.take_finished = take_finished
        try:
            records = self.steps()
        finally:
            del sieve.take_finished
            meter.remove()
        times = {key: clocks["cpu"] for key, clocks in meter.take().items()}
        return records, {**times, "worker_wall": worker_wall}

    def host_steps(self, limit: int) -> list[dict[str, dict[str, float]]]:
        """Take `limit` steps; returns the seconds of each step's parts, by part and clock."""
        meter = host_meter()
        self._wrap_host(meter)
        parts = []
        try:
            for _ in range(limit):
                self.steps(limit=1)
                parts.append(meter.take())
        finally:
            meter.remove()
        return parts

    def _wrap_host(self, meter: Meter) -> None:
        scheduler, runner = self.scheduler, self.runner
        meter.wrap(self.core, "step_fn", "step")
        meter.wrap(scheduler, "schedule", "schedule")
        meter.wrap(scheduler, "update_from_output", "update_from_output")
        meter.wrap(runner, "_update_states", "update_states")
        meter.wrap(runner, "_prepare_inputs", "prepare_inputs")
        meter.wrap(runner.input_batch.block_table, "compute_slot_mapping", "slot_mapping_kernel")
        meter.wrap(runner, "_get_slot_mappings", "slot_mapping_views")
        meter.wrap(runner, "_build_attention_metadata", "metadata")
        meter.wrap(runner, "_model_forward", "forward")
        meter.wrap(self.worker, "execute_model", "execute_model")
        meter.wrap(self.worker, "sample_tokens", "sample_tokens")
        if hasattr(self.worker, "sieve"):
            meter.wrap(self.worker.sieve, "begin_step", "sieve_begin_end")
            meter.wrap(self.worker.sieve, "end_step", "sieve_begin_end")

    def profile_steps(self, limit: int) -> list[dict[str, Any]]:
        """Take `limit` steps with cProfile on in the host's parts only.

        Returns:
            Per function, by own time: calls and milliseconds per step (own and total). The
            profiler makes many small calls look dearer than they are: use it to compare.
        """
        profiler = cProfile.Profile()
        undo = [_profiled(profiler, owner, method) for owner, method in self._host_parts()]
        try:
            self.steps(limit=limit)
        finally:
            for restore in undo:
                restore()
        rows = []
        for where, (_, calls, own, total, _) in pstats.Stats(profiler).stats.items():
            file, line, function = where
            place = file.split("site-packages/")[-1].split("/src/")[-1]
            rows.append(
                {
                    "function": f"{place}:{line}({function})" if line else function,
                    "calls": calls / limit,
                    "own_ms": own / limit * 1e3,
                    "total_ms": total / limit * 1e3,
                }
            )
        return sorted(rows, key=lambda row: -row["own_ms"])

    def _host_parts(self) -> list[tuple[Any, str]]:
        parts = [
            (self.scheduler, "schedule"),
            (self.scheduler, "update_from_output"),
            (self.runner, "_update_states"),
            (self.runner, "_prepare_inputs"),
            (self.runner, "_get_slot_mappings"),
            (self.runner, "_build_attention_metadata"),
        ]
        if hasattr(self.worker, "sieve"):
            parts += [(self.worker.sieve, "begin_step"), (self.worker.sieve, "end_step")]
        return parts


def _profiled(profiler: cProfile.Profile, owner: Any, method: str) -> Callable[[], None]:
    """Profile the calls of one method; returns what undoes it."""
    inner = getattr(owner, method)
    shadowed = vars(owner).get(method)

    def profiled(*args: Any, **kwargs: Any) -> Any:
        profiler.enable()
        try:
            return inner(*args, **kwargs)
        finally:
            profiler.disable()

    def restore() -> None:
        if shadowed is None:
            delattr(owner, method)
        else:
            setattr(owner, method, shadowed)

    setattr(owner, method, profiled)
    return restore
