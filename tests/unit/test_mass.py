from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.kernels import cpu, reference
from kvsieve.policies import attention_mass_lost


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(9, 60))
def test_mass_lost_is_what_a_dense_softmax_gives_to_the_dropped(
    seed: int, window: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(window, 4, 8, generator=generator)
    key = torch.randn(2, num_tokens, 8, generator=generator)
    num_old = num_tokens - window
    num_keep = int(torch.randint(0, num_old + 1, (1,), generator=generator))
    positions = torch.stack(
        [torch.randperm(num_old, generator=generator)[:num_keep].sort().values for _ in range(2)]
    )

    lost = attention_mass_lost(reference.window_sum(query, key, 0.3), positions, window)

    shares = []
    for head in range(4):
        for row in range(window):
            logits = key[head // 2, : num_old + row + 1] @ query[row, head] * 0.3
            weights = torch.softmax(logits, 0)
            dropped = [j for j in range(num_old) if j not in positions[head // 2].tolist()]
            shares.append(float(weights[dropped].sum()))
    assert float(lost) == pytest.approx(sum(shares) / len(shares), abs=1e-5)


def test_nothing_dropped_nothing_lost() -> None:
    scores = torch.rand(2, 3, 10)
    everything = torch.arange(10).expand(2, -1)
    assert float(attention_mass_lost(scores, everything, 4)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "tokens"),
    [(9, 3, 64, 5000), (32, 8, 128, 8000), (8, 8, 64, 700), (64, 1, 128, 6000)],
)
def test_scratch_is_never_more_than_what_is_set_aside(
    heads: int, kv_heads: int, head_size: int, tokens: int
) -> None:
    from torch.profiler import ProfilerActivity, profile

    blocks = torch.arange(-(-tokens // 32))
    cache = torch.randn(len(blocks), kv_heads, 32, 2 * head_size)
    key_pages, value_pages = cpu.split_pages(cache)
    query = torch.randn(32, heads, head_size)
    positions = torch.arange(32, tokens - 32).expand(kv_heads, -1)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        keys = cpu.gather_keys(key_pages, blocks, tokens)
        scores = cpu.window_sum(query, keys, 0.1)
        cpu.compact(key_pages, value_pages, keys, blocks, positions, start=32)
        del scores

    peak = held = 0
    for event in _allocations(profiler):
        held += event
        peak = max(peak, held)
    assert peak <= cpu.scratch_bytes(32, heads, kv_heads, head_size, 4, tokens)
    assert peak >= 0.6 * cpu.scratch_bytes(32, heads, kv_heads, head_size, 4, tokens)


def _allocations(profiler: torch.profiler.profile) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in order."""
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return [nbytes for _, nbytes in sorted(changes)]
