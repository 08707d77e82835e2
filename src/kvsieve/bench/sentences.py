"""What a result says, in sentences."""

from __future__ import annotations

from kvsieve.bench.schema import BenchResult, RatioSummary, WorkloadResult
from kvsieve.bench.tables import answer, ratio_text

# What is said of an arm: the quantity, and the words for it.
_SAID = (
    ("output_tokens_per_s", "output tokens per second"),
    ("output_tokens_per_resource_s", "output tokens per {resource} second"),
    ("ttft_p50", "median TTFT"),
    ("tpot_p50", "median TPOT"),
    ("kv_per_request", "KV memory of a running request"),
    ("running_max", "most requests running at once"),
    ("goodput_per_s", "goodput"),
)


def sentences(result: BenchResult) -> list[str]:
    """The answer to "what does a budget save, and what does it cost?"."""
    said = []
    for workload in result.workloads:
        for arm, ratios in workload.ratios.items():
            said.append(_on_arm(result, workload, arm, ratios))
        if workload.sweep:
            said.append(_on_sweep(workload))
    return said


def _on_arm(
    result: BenchResult, workload: WorkloadResult, arm: str, ratios: dict[str, RatioSummary]
) -> str:
    parts = [
        f"{words.format(resource=result.resource.upper())} {ratio_text(ratios[key])}"
        for key, words in _SAID
        if key in ratios
    ]
    count = len(workload.repeats)
    repeats = "one repeat" if count == 1 else f"{count} repeats, median (min .. max)"
    return f"{workload.name}, {arm} as a multiple of stock ({repeats}): {'; '.join(parts)}."


def _on_sweep(workload: WorkloadResult) -> str:
    sweep = workload.sweep
    assert sweep is not None
    answers = "; ".join(f"{arm} {answer(sweep, arm)}" for arm in sweep.points)
    return (
        f"{workload.name}: clients at once that keep the median TTFT below {sweep.bound_s:g} s:"
        f" {answers}."
    )


def load_text(result: BenchResult) -> str:
    """How requests arrived, in one sentence."""
    load = result.load
    arrive = (
        f"a closed loop of {load.concurrency} clients"
        if load.concurrency
        else f"an open loop of {load.rate:g} requests per second (Poisson)"
    )
    goals = [
        f"{name} at most {value:g} s"
        for name, value in (("TTFT", load.ttft_goal_s), ("TPOT", load.tpot_goal_s))
        if value is not None
    ]
    good = f" A request within the goals has {' and '.join(goals)}." if goals else ""
    servers = "started for each run" if result.one_at_a_time else "alive together, one at work"
    return (
        f"Load: {arrive}, lengths times {load.scale:g}, seed {load.seed}; servers {servers};"
        f" flags of every arm: {' '.join(result.flags) or 'none'}.{good}"
    )
