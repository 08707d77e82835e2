"""`kvsieve bench` against real servers: a tiny run, and one whose server is killed."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from kvsieve.bench.choices import Choices, choose
from kvsieve.bench.compare import compare, load_result
from kvsieve.bench.options import Options
from kvsieve.bench.page import render
from kvsieve.bench.run import run_bench
from kvsieve.bench.schema import BenchResult
from kvsieve.serving.server import ServerError

pytestmark = pytest.mark.engine

FLAGS = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"]


def options(model: str, **changes: Any) -> Options:
    given: dict[str, Any] = {
        "model": model,
        "budgets": "72",
        "policies": None,
        "settings": {},
        "workloads": "long-prompt",
        "scale": 0.04,
        "concurrency": 2,
        "rate": None,
        "requests": 4,
        "repeats": 2,
        "seed": 0,
        "ttft_goal": 60.0,
        "tpot_goal": None,
        "sweep": False,
        "ttft_p50": None,
        "sweep_limit": 1,
        "one_at_a_time": False,
        "kv_cache_gib": 0.1,
        "json_file": None,
        "html_file": None,
        "flags": FLAGS,
    }
    return choose(Choices(**(given | changes)), num_gpus=0)


@pytest.fixture(scope="module")
def kept() -> list[BenchResult]:
    """What was handed over to be kept, in order."""
    return []


@pytest.fixture(scope="module")
def result(real_model: str, kept: list[BenchResult]) -> Iterator[BenchResult]:
    # The bound is never broken, so the sweep ends at its limit.
    chosen = options(
        real_model,
        workloads="multi-turn",
        scale=0.05,
        requests=10,
        sweep=True,
        ttft_p50=60.0,
    )
    yield run_bench(chosen, Console(stderr=True), kept.append)
    assert not servers()


def servers() -> list[psutil.Process]:
    """The servers that this process started and that still run."""
    # Of one that ended and was not waited for yet the system knows no command line.
    children = ((child, child.as_dict(["cmdline"])) for child in psutil.Process().children())
    return [child for child, facts in children if "--served-model-name" in (facts["cmdline"] or ())]


def test_every_arm_ran_the_same_load_in_alternating_order(result: BenchResult) -> None:
    (workload,) = result.workloads
    assert result.complete and workload.name == "multi-turn"
    assert [repeat.order for repeat in workload.repeats] == [
        ("stock", "budget-72"),
        ("budget-72", "stock"),
    ]
    for repeat in workload.repeats:
        one, two = (
            [
                (each.chat, each.turn, each.prompt_tokens, each.output_tokens)
                for each in repeat.arms[arm].requests
            ]
            for arm in repeat.order
        )
        assert one == two and len(one) == 10


def test_only_the_sieved_arm_sieved(result: BenchResult) -> None:
    for workload in result.workloads:
        for repeat in workload.repeats:
            assert repeat.arms["stock"].sieve is None
            proof = repeat.arms["budget-72"].sieve
            assert proof is not None and proof.sieved == proof.expected > 0
            assert 0 < proof.kept_tokens < proof.prompt_tokens and proof.blocks_freed > 0


def test_what_was_measured_makes_sense(result: BenchResult) -> None:
    for workload in result.workloads:
        for repeat in workload.repeats:
            for arm in repeat.arms.values():
                assert 0 < arm.ttft.p50 <= arm.latency.p50 <= arm.latency.p99 <= arm.wall_s
                assert 0 < arm.resource_s <= arm.wall_s * (os.cpu_count() or 1) * 1.5
                assert arm.goodput_share == 1.0
                assert 0 < arm.kv_peak <= 1 and 1 <= arm.running_max <= 2
                assert arm.kv_mean <= arm.kv_peak
                assert arm.kv_peak_mib == pytest.approx(arm.kv_peak * 0.1 * 1024, rel=0.01)
        ratios = workload.ratios["budget-72"]
        assert ratios["output_tokens_per_resource_s"].repeats == 2


def test_a_chat_finds_itself_in_the_prefix_cache_and_nobody_else(result: BenchResult) -> None:
    for repeat in result.workloads[0].repeats:
        stock = repeat.arms["stock"]
        assert len(stock.ttft_by_turn) == 5
        assert {each.cached_tokens for each in stock.requests if each.turn == 0} == {0}
        for before, after in itertools.pairwise(stock.requests):
            if after.turn:
                # All of the turn before, its answer too: its last token alone has no KV yet.
                said = before.prompt_tokens + before.output_tokens - 1
                assert after.cached_tokens == said // 32 * 32


def test_the_sweep_ends_at_its_limit(result: BenchResult) -> None:
    for workload in result.workloads:
        assert workload.sweep is not None
        assert workload.sweep.highest == {"stock": 1, "budget-72": 1}
        for points in workload.sweep.points.values():
            assert [point.concurrency for point in points] == [1]


def test_what_is_finished_is_kept_without_ratios(
    result: BenchResult, kept: list[BenchResult]
) -> None:
    assert [sum(len(each.repeats) for each in one.workloads) for one in kept[:2]] == [1, 2]
    assert not any(one.complete for one in kept)
    assert not any(workload.ratios for one in kept for workload in one.workloads)


def test_the_report_can_be_made_and_the_file_compared(result: BenchResult, tmp_path: Path) -> None:
    assert render(result).count("<svg") == 4
    (tmp_path / "a.json").write_text(result.model_dump_json())
    again = load_result(tmp_path / "a.json")
    assert compare(result, again).differences == ()


@pytest.mark.long
def test_a_server_that_dies_is_named_and_what_was_finished_is_kept(real_model: str) -> None:
    kept: list[BenchResult] = []

    def keep(one: BenchResult) -> None:
        if not kept:
            (stock,) = [each for each in servers() if "kvsieve" not in each.cmdline()]
            os.killpg(stock.pid, signal.SIGKILL)
        kept.append(one)

    with pytest.raises(ServerError, match=r"the stock server was killed by signal 9(.|\n)*log"):
        run_bench(options(real_model, repeats=3), Console(stderr=True), keep)
    last = kept[-1]
    assert not last.complete and "killed by signal 9" in (last.failure or "")
    assert len(last.workloads[0].repeats) == 1 and not last.workloads[0].ratios
    assert not servers()
