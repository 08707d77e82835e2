"""Abort a request in a chosen phase of its life, with a companion that goes on.

Runs inside an engine's process, for stock and sieved engines alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine import engines

PHASES = (
    "waiting",
    "mid-prefill",
    "in the step that ends the prompt",
    "right after that step",
    "decoding",
    "preempted",
)


@dataclass
class Aborted:
    """What an abort left behind.

    Attributes:
        computed: Tokens of the victim that were scheduled when it was aborted.
        leaked: Blocks that did not come back once all were done.
        open_windows: Observation windows that did not come back; 0 for a stock engine.
        remembered: Requests that the scheduler still knows.
        companion: Tokens of the request that ran beside the victim.
    """

    computed: int
    leaked: int
    open_windows: int
    remembered: int
    companion: list[int]


def abort_at(
    name: str,
    phase: str,
    prompt: list[int],
    companion: list[int],
    *,
    companion_tokens: int = 40,
) -> Aborted:
    """Run two requests through an engine and abort the first in a phase.

    Args:
        name: The engine. Nothing else may run on it.
        phase: One of `PHASES`.
        prompt: Prompt of the victim, several chunks long.
        companion: A short prompt that is decoded beside it.
        companion_tokens: Tokens that the companion generates.
    """
    from vllm import SamplingParams

    engine = engines._engines[name].llm_engine
    scheduler = engines.scheduler(name)
    baseline = engines.free_blocks(name)
    chunk = scheduler.max_num_scheduled_tokens
    sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    beside: list[int] = []

    def step() -> None:
        for output in engine.step():
            if output.request_id == "companion" and output.finished:
                beside.extend(output.outputs[0].token_ids)

    def step_until(reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            step()
        raise AssertionError(f"the phase {phase!r} never came")

    engine.add_request(
        "companion",
        {"prompt_token_ids": companion},
        SamplingParams(**sampling, max_tokens=companion_tokens),
    )
    step()
    victim_id = engine.add_request(
        "victim", {"prompt_token_ids": prompt}, SamplingParams(**sampling, max_tokens=30)
    )
    victim = scheduler.requests[victim_id]

    if phase == "waiting":
        pass
    elif phase == "mid-prefill":
        step_until(lambda: 0 < victim.num_computed_tokens < len(prompt))
    elif phase == "in the step that ends the prompt":
        # The companion takes one token of each step.
        step_until(lambda: len(prompt) - victim.num_computed_tokens <= chunk - 1)
        # What arrives while the model runs is processed before the step's result.
        engines.core(name).aborts_queue.put([victim_id])
        step()
        step_until(lambda: victim.is_finished())
    elif phase == "right after that step":
        step_until(lambda: victim.num_computed_tokens >= len(prompt))
    elif phase == "decoding":
        step_until(lambda: victim.num_output_tokens >= 5)
    elif phase == "preempted":
        step_until(lambda: victim.num_output_tokens >= 5)
        assert engine.reset_prefix_cache(True)
        assert victim.status.name == "PREEMPTED"
    computed = victim.num_computed_tokens
    engine.abort_request(["victim"])
    assert victim.is_finished()
    while engine.has_unfinished_requests():
        step()
    # What ended is told to the worker with the next step's message.
    engine.add_request("after", {"prompt_token_ids": [5]}, SamplingParams(**sampling, max_tokens=2))
    while engine.has_unfinished_requests():
        step()
    sieve = getattr(engines.worker(name), "sieve", None)
    return Aborted(
        computed=computed,
        leaked=baseline - engines.free_blocks(name),
        open_windows=sieve.observer.num_open if sieve else 0,
        remembered=len(scheduler.requests) + _remembered_by_the_sieve(scheduler),
        companion=beside,
    )


def _remembered_by_the_sieve(scheduler: Any) -> int:
    managers = getattr(scheduler, "sieved_managers", ())
    if not managers:
        return 0
    kept = [
        scheduler.proof._rows,
        scheduler.planned._plans,
        scheduler._to_free,
        scheduler._with_stop_strings,
    ]
    return sum(map(len, kept)) + sum(len(manager._freed) for manager in managers)
