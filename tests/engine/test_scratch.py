"""What scoring and compaction hold at once is no more than what is set aside for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve.policies import METHODS
from tests.engine.host import EngineHost

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32


def peak_and_bound(name: str, heads: int, kv_heads: int, head_size: int, tokens: int) -> list[int]:
    """Runs in an engine's process: peak of one prompt's allocations in one layer, and its bound."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kvsieve.engine.backends import CachedPrompt
    from kvsieve.engine.backends.cpu import CpuAdapter
    from kvsieve.policies import Rotary, parse_settings, policy_from_config

    policy = policy_from_config(parse_settings({"policy": name}))
    num_blocks = -(-tokens // BLOCK_SIZE)
    module = SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        kv_cache=torch.randn(num_blocks, kv_heads, BLOCK_SIZE, 2 * head_size),
        kv_cache_torch_dtype=torch.float32,
        impl=SimpleNamespace(scale=0.1),
    )
    layer: Any = SimpleNamespace(
        name="layer",
        number=3,
        module=module,
        rotary=Rotary(torch.randn(tokens + 600, head_size), is_neox=True),
        output_projection=torch.randn(heads, head_size, heads * head_size),
    )
    prompt = CachedPrompt(layer, torch.arange(num_blocks), tokens)
    window = torch.randn(min(policy.observation_window, tokens), heads, head_size)
    gathered = None
    if policy.accumulator is not None:
        chunk = CpuAdapter.chunk(prompt, torch.randn(tokens, heads, head_size), 0)
        gathered = policy.accumulator.add(policy.accumulator.start(chunk), chunk)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        evidence = CpuAdapter.evidence(prompt, window, gathered)
        positions = policy.choose(evidence, tokens - BLOCK_SIZE)
        evidence.window_attention()
        evidence.compact(positions, BLOCK_SIZE)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = held = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return [peak, CpuAdapter.scratch_bytes(module, policy, tokens)]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "headkv"])
@pytest.mark.parametrize("shape", [(9, 3, 64, 3000), (32, 8, 128, 1500), (8, 8, 64, 400)])
def test_scratch_is_never_more_than_what_is_set_aside(
    v1_host: EngineHost, name: str, shape: tuple[int, ...]
) -> None:
    peak, bound = v1_host.call(peak_and_bound, name, *shape)

    assert peak <= bound
