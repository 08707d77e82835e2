"""From answers to figures, and the proof that the sieve ran."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.bench.errors import BenchError
from kvsieve.bench.options import Goals
from kvsieve.bench.proof import prove
from kvsieve.bench.summary import is_good
from kvsieve.bench.watch import preemptions, sample
from tests.unit.bench_results import OUTPUT, PROMPT, SIEVED, STOCK, answered, report, run


def test_the_figures_of_a_run_follow_from_its_times() -> None:
    # Four requests, a second apart; the last begins after 3 s and takes 0.5 + 10 x 0.1 s.
    figures = run(STOCK)
    assert figures.wall_s == pytest.approx(4.5)
    assert figures.output_tokens_per_s == pytest.approx(4 * OUTPUT / 4.5)
    assert figures.total_tokens_per_s == pytest.approx(4 * (OUTPUT + PROMPT) / 4.5)
    assert figures.requests_per_s == pytest.approx(4 / 4.5)
    assert figures.output_tokens_per_resource_s == pytest.approx(4 * OUTPUT / 2.0)
    assert figures.ttft.p50 == pytest.approx(0.5) and figures.tpot.p99 == pytest.approx(0.1)
    assert figures.latency.p90 == pytest.approx(1.5)
    assert figures.cached_share == pytest.approx(40 / PROMPT)
    assert figures.sieve is None and figures.goodput_share is None


def test_a_gpu_second_is_a_second_of_each_gpu() -> None:
    assert run(STOCK, gpus=2).resource_s == pytest.approx(9.0)


def test_only_what_was_seen_during_the_run_counts() -> None:
    figures = run(STOCK)
    assert [each.at_s for each in figures.samples] == [0.0, 1.0, 2.0]
    assert figures.kv_peak == 0.6 and figures.kv_mean == pytest.approx(0.4)
    assert figures.kv_peak_mib == pytest.approx(0.6)
    assert (figures.running_max, figures.waiting_max) == (2, 1)
    assert figures.running_mean == pytest.approx(1.5)


def test_each_turn_has_its_own_time_to_first_token() -> None:
    chat = [answered(STOCK, turn=turn, ttft=0.1 * (turn + 1)) for turn in range(3)]
    turns = [quantiles.p50 for quantiles in run(STOCK, requests=chat).ttft_by_turn]
    assert turns == pytest.approx([0.1, 0.2, 0.3])


def test_a_good_request_keeps_every_goal() -> None:
    requests = [answered(STOCK, number=n, ttft=0.2 * (n + 1)) for n in range(4)]
    figures = run(STOCK, requests=requests, goals=Goals(0.5, 0.11))
    assert figures.goodput_share == 0.5
    assert figures.goodput_per_s == pytest.approx(2 / figures.wall_s)
    assert run(STOCK, requests=requests, goals=Goals(None, 0.05)).goodput_share == 0.0


@given(st.floats(0.01, 2), st.floats(0.01, 2))
def test_a_stricter_goal_never_makes_more_requests_good(one: float, two: float) -> None:
    low, high = sorted((one, two))
    for request in run(STOCK).requests:
        assert is_good(request, Goals(high)) or not is_good(request, Goals(low))


def test_the_proof_is_summed_from_the_responses() -> None:
    proof = run(SIEVED).sieve
    assert proof is not None
    assert (proof.requests, proof.expected, proof.sieved) == (4, 4, 4)
    assert (proof.prompt_tokens, proof.kept_tokens, proof.blocks_freed) == (1600, 544, 32)


NOT_SIEVED = [(PROMPT, report(sieved=False))] * 3


def test_an_arm_that_should_have_sieved_and_did_not_is_an_error() -> None:
    with pytest.raises(
        BenchError, match="3 of 3 prompts are longer than the budget of 128 tokens, and none was"
    ):
        prove({"budget": 128}, 32, NOT_SIEVED)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 400},
        {"budget": 380},  # Less than a block over the budget: nothing can be freed.
        {"budget": 128, "mode": "shadow"},
        {"budget": 128, "mode": "full"},
        {"budget": "100%"},
    ],
)
def test_where_nothing_is_to_be_dropped_nothing_is_expected(settings: dict[str, Any]) -> None:
    proof = prove(settings, 32, NOT_SIEVED)
    assert proof is not None and (proof.expected, proof.sieved) == (0, 0)


@pytest.mark.parametrize("block_size", [16, 32, None])
def test_a_share_is_expected_too(block_size: int | None) -> None:
    with pytest.raises(BenchError, match="25"):
        prove({"budget": "25%"}, block_size, NOT_SIEVED)


def test_a_response_without_a_report_proves_nothing() -> None:
    with pytest.raises(BenchError, match="1 of 2 responses carry no report"):
        prove({"budget": 128}, 32, [(PROMPT, report()), (PROMPT, None)])


def test_an_arm_that_should_have_pruned_and_did_not_is_an_error() -> None:
    unpruned = {**report(), "pruned": None, "not_pruned": "400 tokens must be read at once"}
    pruned = {**report(), "pruned": {"method": "asl"}, "not_pruned": None}
    settings = {"budget": 128, "prune": "asl"}
    with pytest.raises(BenchError, match=r"2 of 2 .* pruned \(asl\), and none was: 400 tokens"):
        prove(settings, 32, [(PROMPT, unpruned)] * 2)

    assert prove(settings, 32, [(PROMPT, unpruned), (PROMPT, pruned)]) is not None


def test_stock_with_a_report_is_not_stock() -> None:
    assert prove(None, 32, [(PROMPT, None)]) is None
    with pytest.raises(BenchError, match="1 responses of the stock server carry a report"):
        prove(None, 32, [(PROMPT, None), (PROMPT, report())])


def test_what_metrics_say_is_read() -> None:
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        'vllm:num_preemptions_total{engine="0",model_name="m"} 5.0\n'
    )
    seen = sample(text, 1.5)
    assert (seen.at_s, seen.kv_usage, seen.running, seen.waiting) == (1.5, 0.25, 3, 2)
    assert preemptions(text) == 5
