"""Rules of the sieved cache spec that no CPU model can show: its kernel block is the manager's."""

from __future__ import annotations

import pytest

from tests.engine.host import EngineHost

pytestmark = pytest.mark.engine


def specs() -> dict[str, object]:
    """Runs in an engine's process."""
    import pickle
    from dataclasses import replace

    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvsieve.core.budget import BudgetRule
    from kvsieve.core.tiers import uniform_tier
    from kvsieve.engine.spec import sieved_spec

    stock = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    spec = sieved_spec(stock, uniform_tier(BudgetRule(tokens=100)), 32)
    for_kernel = replace(spec, block_size=16)
    other = sieved_spec(stock, uniform_tier(BudgetRule(tokens=200)), 32)
    return {
        "starts": [spec.start(300), for_kernel.start(300)],
        "own budget": spec.start(300, BudgetRule(tokens=200)),
        "one group": [
            spec.is_uniform_with_collection({"a": spec, "b": pickle.loads(pickle.dumps(spec))}),
            spec.is_uniform_with_collection({"a": spec, "b": other}),
            spec.is_uniform_with_collection({"a": spec, "b": stock}),
        ],
    }


def test_the_start_follows_the_managers_block_size(v1_host: EngineHost) -> None:
    assert v1_host.call(specs)["starts"] == [192, 192]


def test_a_requests_own_budget_takes_the_layers_place(v1_host: EngineHost) -> None:
    assert v1_host.call(specs)["own budget"] == 96


def test_only_layers_of_one_budget_share_a_group(v1_host: EngineHost) -> None:
    assert v1_host.call(specs)["one group"] == [True, False, False]
