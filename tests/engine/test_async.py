"""Asynchronous scheduling: a step is scheduled before the last one's tokens are processed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.aborts import PHASES, abort_at
from tests.engine.async_scheduling import (
    free_on_scheduled_counts,
    make_async_engine,
    overlap,
)
from tests.engine.engines import as_generated, drop_engine, generate, make_engine
from tests.engine.fuzz import Traffic, run_traffic
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt
from tests.engine.test_fuzz import check_round, pool_of
from tests.oracle.snapkv_oracle import Oracle

pytestmark = pytest.mark.engine

SETTINGS = {"budget": 96, "full_layers": 2}
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 544, "max_num_batched_tokens": 150}
GREEDY = {"ignore_eos": True, "detokenize": False}
LENGTHS = (500, 90, 333, 12, 128, 97, 410)
ANSWERS = (12, 20, 1, 30, 2, 7, 3)


@pytest.fixture(params=["v1", "v2"])
def host(request: pytest.FixtureRequest) -> EngineHost:
    return request.getfixturevalue(f"{request.param}_host")


@pytest.fixture(scope="module")
def oracle(tiny_llama: str) -> Oracle:
    return Oracle(tiny_llama)


def mixed_batch() -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts that are sieved and not, with answers of one token and many."""
    prompts = [random_prompt(length, length) for length in LENGTHS]
    return prompts, [{**GREEDY, "max_tokens": answer} for answer in ANSWERS]


def test_async_writes_what_sync_writes(host: EngineHost, tiny_llama: str) -> None:
    prompts, sampling = mixed_batch()
    host.call(make_engine, "sync", tiny_llama, SETTINGS, **OPTIONS)
    expected = host.call(generate, "sync", prompts, sampling)
    host.call(drop_engine, "sync")
    host.call(make_async_engine, "async", tiny_llama, SETTINGS, **OPTIONS)
    outcomes = host.call(generate, "async", prompts, sampling)
    overlapped = host.call(overlap, "async")
    host.call(drop_engine, "async")

    assert overlapped.early_frees == 0
    # All but the first step were scheduled with one in flight, most rows in both.
    assert overlapped.with_step_in_flight > 0.9 * overlapped.steps
    assert overlapped.rows_in_flight > overlapped.steps
    for length, answer, sync, other in zip(LENGTHS, ANSWERS, expected, outcomes, strict=True):
        assert other.token_ids == sync.token_ids, length
        assert len(other.token_ids) == answer
        assert other.report == sync.report
        assert other.report["sieved"] is (length >= 128)
        assert set(other.kept) == set(sync.kept)


def test_async_preempts_and_recomputes_the_same_text(
    host: EngineHost, tiny_llama: str, oracle: Oracle
) -> None:
    host.call(
        make_async_engine,
        "async",
        tiny_llama,
        SETTINGS,
        **{**OPTIONS, "max_num_batched_tokens": 64},
        kv_cache_memory_bytes=pool_of(54),
        max_num_seqs=8,
    )
    requests = 12 if host.runner == "v1" else 9
    traffic = Traffic(2, num_requests=requests, max_prompt=200, max_output=120, arrival_chance=0.9)
    outcome = host.call(run_traffic, "async", traffic)
    overlapped = host.call(overlap, "async")
    host.call(drop_engine, "async")

    assert overlapped.preemptions > 0
    assert overlapped.early_frees == 0
    assert overlapped.with_step_in_flight > 0.7 * overlapped.steps
    check_round(oracle, outcome, SETTINGS["budget"])


def test_async_random_traffic_with_aborts_and_shared_prefixes(
    host: EngineHost, tiny_llama: str, oracle: Oracle
) -> None:
    host.call(
        make_async_engine,
        "async",
        tiny_llama,
        SETTINGS,
        **{**OPTIONS, "max_num_batched_tokens": 200},
        kv_cache_memory_bytes=pool_of(120),
        enable_prefix_caching=True,
    )
    requests = 20 if host.runner == "v1" else 8
    traffic = Traffic(
        11, num_requests=requests, max_output=30, abort_chance=0.06, shared_prefix=120
    )
    outcome = host.call(run_traffic, "async", traffic)
    host.call(drop_engine, "async")

    assert outcome.events["abort"] > 0
    check_round(oracle, outcome, SETTINGS["budget"])


@pytest.mark.parametrize("phase", PHASES)
def test_async_abort_leaves_nothing_behind(
    v1_host: EngineHost, async_engine: str, phase: str
) -> None:
    prompt, companion = random_prompt(400, 1), random_prompt(9, 2)
    sampling = {**GREEDY, "max_tokens": 40}
    (alone,) = v1_host.call(generate, async_engine, [companion], sampling)
    # A prompt that is cached is not read in chunks.
    v1_host.call(reset_prefix_cache, async_engine)

    aborted = v1_host.call(abort_at, async_engine, phase, prompt, companion)

    assert (aborted.leaked, aborted.open_windows, aborted.remembered) == (0, 0, 0)
    assert aborted.companion == alone.token_ids
    again = v1_host.call(generate, async_engine, [prompt], sampling)[0]
    v1_host.call(reset_prefix_cache, async_engine)
    fresh = v1_host.call(generate, async_engine, [prompt], sampling)[0]
    assert again.token_ids == fresh.token_ids
    assert again.report["sieved"] is True


@pytest.fixture(scope="module")
def async_engine(v1_host: EngineHost, tiny_llama: str) -> str:
    v1_host.call(
        make_async_engine,
        "async-aborts",
        tiny_llama,
        SETTINGS,
        **{**OPTIONS, "max_num_batched_tokens": 96},
        enable_prefix_caching=True,
    )
    return "async-aborts"


def test_a_free_before_its_step_is_processed_is_noticed(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    v1_host.call(make_async_engine, "async", tiny_llama, SETTINGS, **OPTIONS)
    v1_host.call(free_on_scheduled_counts, "async")
    v1_host.call(generate, "async", [random_prompt(300, 1)], {**GREEDY, "max_tokens": 5})
    overlapped = v1_host.call(overlap, "async")
    v1_host.call(drop_engine, "async")

    # In each of the two groups of sieved layers.
    assert overlapped.early_frees == 2


def reset_prefix_cache(name: str) -> None:
    """Runs in an engine's process: forget every cached block."""
    from tests.engine import engines

    assert engines._engines[name].reset_prefix_cache()


def generate_with_a_separate_worker(
    name: str, prompts: list[list[int]], sampling: list[dict[str, Any]]
) -> list[Any]:
    """Runs in an engine's process: `generate`, where the worker cannot be looked into."""
    from vllm import SamplingParams

    from tests.engine import engines

    outputs = engines._engines[name].generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(temperature=0, **kwargs) for kwargs in sampling],
        use_tqdm=False,
    )
    return [as_generated(output, {}) for output in outputs]


def test_async_with_the_worker_in_a_process_of_its_own(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    prompts, sampling = mixed_batch()
    v1_host.call(make_engine, "sync", tiny_llama, SETTINGS, **OPTIONS)
    expected = v1_host.call(generate, "sync", prompts, sampling)
    v1_host.call(drop_engine, "sync")
    v1_host.call(make_async_engine, "async", tiny_llama, SETTINGS, separate_worker=True, **OPTIONS)
    outcomes = v1_host.call(generate_with_a_separate_worker, "async", prompts, sampling)
    overlapped = v1_host.call(overlap, "async")
    v1_host.call(drop_engine, "async")

    # Steps were scheduled while the model was still running the one before.
    assert overlapped.unfinished_futures > overlapped.steps / 2
    for length, sync, other in zip(LENGTHS, expected, outcomes, strict=True):
        assert other.token_ids == sync.token_ids, length
        assert other.report == sync.report
