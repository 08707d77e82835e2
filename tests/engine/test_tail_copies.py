"""Copies of tails: published when their step was processed, dropped when the cache is reset."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import engines
from tests.engine.async_scheduling import make_async_engine
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 544,
    "enable_prefix_caching": True,
}


def step_until_copies_are_in_flight(name: str) -> set[Any]:
    """Runs in an engine's process: stop where a prompt's tail is being copied; its keys."""
    from vllm import SamplingParams

    engine = engines._engines[name].llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    engine.add_request("one", {"prompt_token_ids": random_prompt(300, 1)}, sampling)
    copies = engines.scheduler(name).tail_copies
    while not copies.num_held:
        engine.step()
    return set(copies._keys)


def is_cached(name: str, keys: set[Any]) -> list[bool]:
    cache = engines.scheduler(name).kv_cache_manager.block_pool.cached_block_hash_to_block
    return [cache.get_one_block(key) is not None for key in keys]


def publish_and_forget(name: str) -> dict[str, Any]:
    keys = step_until_copies_are_in_flight(name)
    before = is_cached(name, keys)
    engine = engines._engines[name].llm_engine
    while engine.has_unfinished_requests():
        engine.step()
    return {"keys": len(keys), "before": any(before), "after": all(is_cached(name, keys))}


def reset_in_flight(name: str) -> dict[str, Any]:
    keys = step_until_copies_are_in_flight(name)
    scheduler = engines.scheduler(name)
    engine = engines._engines[name].llm_engine
    succeeded = scheduler.reset_prefix_cache(reset_running_requests=True)
    held = scheduler.tail_copies.num_held
    # The step that made the copies is processed now, and must publish nothing of them. The
    # request is read again meanwhile, in chunks, and will publish them later.
    request = next(iter(scheduler.requests.values()))
    while request.num_computed_tokens < 200:
        engine.step()
    stale = any(is_cached(name, keys))
    while engine.has_unfinished_requests():
        engine.step()
    return {"succeeded": succeeded, "held": held, "stale": stale}


def test_copies_are_published_once_their_step_was_processed(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    settings = {"budget": 96, "full_layers": 2}
    v1_host.call(make_async_engine, "tails", tiny_llama, settings, **OPTIONS)

    outcome = v1_host.call(publish_and_forget, "tails")

    # 300 tokens, start 192: blocks 6 to 8 of the tail are whole, in two sieved groups.
    assert outcome == {"keys": 6, "before": False, "after": True}


def test_a_reset_drops_copies_in_flight(v1_host: EngineHost, tiny_llama: str) -> None:
    settings = {"budget": 96, "full_layers": 2}
    v1_host.call(
        make_async_engine, "tails", tiny_llama, settings, max_num_batched_tokens=100, **OPTIONS
    )

    outcome = v1_host.call(reset_in_flight, "tails")

    assert outcome == {"succeeded": True, "held": 0, "stale": False}
