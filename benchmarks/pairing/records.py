"""What an arm reports of a step and of a request, and what is made of repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """One engine step.

    Attributes:
        cpu: CPU seconds of the whole process.
        wall: Seconds on the clock.
        prompt_tokens: Tokens that prefill (or recompute after a preemption).
        decode_tokens: Tokens that decode.
        running: Requests that are running after the schedule.
        preempted: Requests that the schedule preempted.
        blocks_held: Blocks out of the pool after the schedule.
    """

    cpu: float
    wall: float
    prompt_tokens: int
    decode_tokens: int
    running: int
    preempted: int
    blocks_held: int


class RequestRecord(NamedTuple):
    """One finished request. Times count from its submission.

    Attributes:
        request_id: Its id.
        token_ids: Tokens generated.
        report: `kv_transfer_params["kvsieve"]`, or None.
        first_token_cpu: CPU seconds of the process until the first token.
        first_token_wall: Seconds until the first token.
        last_token_cpu: CPU seconds until the last token.
        last_token_wall: Seconds until the last token.
        prompt_tokens: Length of its prompt.
        cached_tokens: Tokens of it that the prefix cache had, as vLLM reports them.
    """

    request_id: str
    token_ids: list[int]
    report: dict[str, Any] | None
    first_token_cpu: float
    first_token_wall: float
    last_token_cpu: float
    last_token_wall: float
    prompt_tokens: int
    cached_tokens: int


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest value."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def verdict(
    summary: dict[str, float], *, at_most: float | None = None, at_least: float | None = None
) -> dict[str, Any]:
    """A summary with its aim, a bound on one side, and whether the median meets it."""
    if at_most is not None:
        return {**summary, "aim": f"<= {at_most:g}", "met": summary["median"] <= at_most}
    assert at_least is not None, "an aim needs a bound"
    return {**summary, "aim": f">= {at_least:g}", "met": summary["median"] >= at_least}


def held(blocks_held: float, description: dict[str, Any]) -> dict[str, float]:
    """Held blocks as MiB and as a share of the arm's pool: arms differ in the size of a block."""
    return {
        "blocks": blocks_held,
        "mib": blocks_held * description["block_bytes"] / 2**20,
        "pool_share": blocks_held / description["num_blocks"],
    }
