"""Results of made-up benchmarks, put together by the code that puts together real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.bench.load import Answered
from kvsieve.bench.options import Arm, Goals
from kvsieve.bench.run import summarise_repeats, with_ratios
from kvsieve.bench.schema import (
    ArmRecord,
    ArmRun,
    BenchResult,
    LoadRecord,
    ModelRecord,
    PoolSample,
    Repeat,
    Sweep,
    SweepPoint,
    WorkloadResult,
)
from kvsieve.bench.summary import Costs, summarise
from kvsieve.bench.workload import WORKLOADS
from kvsieve.serving.client import Completion

STOCK, SIEVED = Arm("stock", None), Arm("budget-128", {"budget": 128})
PROMPT, OUTPUT = 400, 11


def record(arm: Arm) -> ArmRecord:
    return ArmRecord(
        name=arm.name,
        settings=None if arm.settings is None else dict(arm.settings),
        start_s=20.0,
        block_size=32,
        num_blocks=100,
        pool_bytes=2**20,
        max_model_len=4096,
    )


def report(*, sieved: bool = True) -> dict[str, Any]:
    kept = 136 if sieved else PROMPT
    return {
        "sieved": sieved,
        "prompt_tokens": PROMPT,
        "stored_tokens": {"full": PROMPT, "sieved": kept},
        "blocks_freed": 8 if sieved else 0,
    }


def answered(
    arm: Arm, *, number: int = 0, turn: int = 0, ttft: float = 0.5, tpot: float = 0.1
) -> Answered:
    sent = 100.0 + number
    first = sent + ttft
    return Answered(
        number,
        turn,
        0.0,
        Completion(
            text="",
            token_ids=(),
            prompt_tokens=PROMPT,
            completion_tokens=OUTPUT,
            cached_tokens=40,
            finish_reason="length",
            report=None if arm.settings is None else report(),
            sent_at=sent,
            token_times=(first, first + tpot * (OUTPUT - 1)),
        ),
    )


SAMPLES = (
    PoolSample(at_s=-0.1, kv_usage=0.9, running=9, waiting=9),
    PoolSample(at_s=0.0, kv_usage=0.2, running=1, waiting=0),
    PoolSample(at_s=1.0, kv_usage=0.6, running=2, waiting=1),
    PoolSample(at_s=2.0, kv_usage=0.4, running=1, waiting=0),
    PoolSample(at_s=99.0, kv_usage=1.0, running=9, waiting=9),
)


def run(
    arm: Arm,
    *,
    requests: Sequence[Answered] | None = None,
    ttft: float = 0.5,
    gpus: int = 0,
    goals: Goals = Goals(),  # noqa: B008 - frozen
    others_cpu_s: float = 0.0,
) -> ArmRun:
    if requests is None:
        requests = [answered(arm, number=number, ttft=ttft) for number in range(4)]
    costs = Costs(cpu_s=2.0, client_cpu_s=0.2, others_cpu_s=others_cpu_s, gpus=gpus, preemptions=0)
    return summarise(arm, record(arm), requests, SAMPLES, costs, goals)


def sweep() -> Sweep:
    def point(arm: Arm, clients: int, ttft: float) -> SweepPoint:
        return SweepPoint(concurrency=clients, met=ttft < 1.0, run=run(arm, ttft=ttft))

    return Sweep(
        bound_s=1.0,
        limit=2,
        points={
            "stock": (point(STOCK, 1, 2.0),),
            "budget-128": (point(SIEVED, 1, 0.5), point(SIEVED, 2, 0.9)),
        },
        highest={"stock": 0, "budget-128": 2},
    )


def result(
    *,
    ttfts: Sequence[float] = (0.25, 0.5, 0.75),
    complete: bool = True,
    workload: str = "mixed",
    **changes: Any,
) -> BenchResult:
    """A result whose sieved arm has these times to first token, and stock always 0.5 s."""
    repeats = [
        Repeat(
            order=("stock", "budget-128"),
            arms={"stock": run(STOCK), "budget-128": run(SIEVED, ttft=ttft)},
            ratios={},
        )
        for ttft in ttfts
    ]
    if complete:
        repeats = [with_ratios(repeat) for repeat in repeats]
    made = WorkloadResult(
        name=workload,
        summary=WORKLOADS[workload].summary,
        prompt_tokens=(PROMPT, PROMPT, PROMPT),
        output_tokens=(OUTPUT, OUTPUT, OUTPUT),
        repeats=tuple(repeats),
        ratios=summarise_repeats(repeats) if complete else {},
        sweep=sweep(),
    )
    values: dict[str, Any] = {
        "complete": complete,
        "failure": None if complete else "the stock server was killed by signal 9\n | log",
        "model": ModelRecord(given="/models/m", name="m", config_sha256="ab"),
        "load": LoadRecord(
            concurrency=2,
            rate=None,
            requests=4,
            scale=0.1,
            repeats=len(ttfts),
            seed=0,
            ttft_goal_s=None,
            tpot_goal_s=None,
        ),
        "flags": ("--dtype", "float32"),
        "one_at_a_time": False,
        "resource": "cpu",
        "arms": (record(STOCK), record(SIEVED)),
        "workloads": (made,),
        "notes": (),
        "provenance": {"date": "2025-01-01T00:00:00+00:00", "machine": {"cpu": "A", "cores": 2}},
    }
    return BenchResult(**(values | changes))
