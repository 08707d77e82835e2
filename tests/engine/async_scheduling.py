"""Asynchronous scheduling on a CPU, where vLLM's platform switches it off.

Runs inside an engine's process. The asynchronous scheduler, the engine core's batch queue
and the model runner's asynchronous output are vLLM's own; only the platform's last word is
overruled. With the executor in the engine's process a step's model call is over when the
next step is scheduled, but its tokens are not processed: the scheduler sees exactly what it
sees on a GPU. `separate_worker` puts the model into a process of its own, and then
two steps are really under way at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.engine import engines


@contextmanager
def _async_scheduling_kept() -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = stock


@contextmanager
def _children_allowed() -> Iterator[None]:
    """The host's process is a daemon, which may have no children of its own."""
    import multiprocessing

    config = multiprocessing.current_process()._config
    daemon = config.pop("daemon", False)
    try:
        yield
    finally:
        config["daemon"] = daemon


def make_async_engine(
    name: str,
    model: str,
    settings: dict[str, Any] | None,
    *,
    separate_worker: bool = False,
    **kwargs: Any,
) -> None:
    """Start an engine that schedules asynchronously, or fail.

    Args:
        name: As for `make_engine`.
        model: As for `make_engine`.
        settings: As for `make_engine`.
        separate_worker: Run the model in a worker process.
        kwargs: As for `make_engine`.
    """
    if separate_worker:
        kwargs["distributed_executor_backend"] = "mp"
    with _async_scheduling_kept(), _children_allowed():
        engines.make_engine(name, model, settings, **kwargs)
    core = engines.core(name)
    assert core.vllm_config.scheduler_config.async_scheduling is True
    assert core.batch_queue_size == 2
    assert core.step_fn == core.step_with_batch_queue
    watch(name)


@dataclass
class Overlap:
    """What happened while steps were scheduled.

    Attributes:
        steps: Steps scheduled.
        with_step_in_flight: Those scheduled before the last one was processed.
        rows_in_flight: Rows scheduled while their request was in a step in flight.
        unfinished_futures: Steps scheduled before the last one's tokens were fetched.
        preemptions: Preemptions.
        early_frees: Prompts whose blocks the sieve freed while a step that reads them
            was in flight.
    """

    steps: int = 0
    with_step_in_flight: int = 0
    rows_in_flight: int = 0
    unfinished_futures: int = 0
    preemptions: int = 0
    early_frees: int = 0


_overlaps: dict[str, Overlap] = {}


def watch(name: str) -> None:
    """Count from now on what overlaps in an engine."""
    core = engines.core(name)
    scheduler = core.scheduler
    overlap = _overlaps[name] = Overlap()
    stock_schedule = scheduler.schedule
    stock_preempt = scheduler._preempt_request

    def schedule(*args: Any, **kwargs: Any) -> Any:
        in_flight = [future for future, output, _ in core.batch_queue or ()]
        unprocessed = {
            request_id
            for _, output, _ in core.batch_queue or ()
            for request_id in output.num_scheduled_tokens
        }
        output = stock_schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            overlap.steps += 1
            overlap.with_step_in_flight += bool(unprocessed)
            overlap.rows_in_flight += len(unprocessed & output.num_scheduled_tokens.keys())
            overlap.unfinished_futures += any(not future.done() for future in in_flight)
        return output

    def preempt(*args: Any, **kwargs: Any) -> Any:
        overlap.preemptions += 1
        return stock_preempt(*args, **kwargs)

    def watched(manager: Any) -> None:
        stock_remove = manager.remove_skipped_blocks

        def remove_skipped_blocks(
            request_id: str, processed: int, num_prompt_tokens: int | None = None, **kwargs: Any
        ) -> None:
            was_freed = request_id in manager._freed
            stock_remove(request_id, processed, num_prompt_tokens, **kwargs)
            if request_id in manager._freed and not was_freed:
                overlap.early_frees += any(
                    computed_before(output, request_id) < num_prompt_tokens
                    for _, output, _ in core.batch_queue
                    if request_id in output.num_scheduled_tokens
                )

        manager.remove_skipped_blocks = remove_skipped_blocks

    for manager in getattr(scheduler, "sieved_managers", ()):
        watched(manager)
    scheduler.schedule = schedule
    scheduler._preempt_request = preempt


def computed_before(output: Any, request_id: str) -> int:
    """Tokens of a request that were computed before a scheduled step."""
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            return new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    return cached.num_computed_tokens[cached.req_ids.index(request_id)]


def free_on_scheduled_counts(name: str) -> None:
    """A planted bug: the sieve frees a prompt's blocks once its last step is scheduled."""
    scheduler = engines.scheduler(name)
    stock_schedule = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        for request_id, request in scheduler._to_free.items():
            if request.status.name == "RUNNING":
                scheduler.kv_cache_manager.remove_skipped_blocks(
                    request_id, request.num_computed_tokens, request.num_prompt_tokens
                )
        return stock_schedule(*args, **kwargs)

    scheduler.schedule = schedule


def overlap(name: str) -> Overlap:
    """What overlapped in an engine since it was made or watched."""
    return _overlaps[name]
