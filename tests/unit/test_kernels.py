"""The CPU kernels against the definition, on awkward shapes and poisoned memory."""

from __future__ import annotations

import pytest
import torch

from kvsieve.kernels import cpu, reference

BLOCK_SIZE = 32
SHAPES = [
    # window, prompt, KV heads, group, head size
    (1, 1, 1, 1, 64),
    (1, 63, 2, 3, 64),
    (8, 100, 3, 1, 96),
    (32, 33, 2, 4, 64),
    (32, 2000, 1, 7, 128),
    (64, 257, 2, 8, 64),
    (32, 32, 2, 2, 64),
]


def make_cache(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, num_blocks: int
) -> torch.Tensor:
    """A cache in vLLM's CPU layout, NaN wherever nothing was written."""
    num_kv_heads, num_tokens, head_size = key.shape
    cache = torch.full(
        (num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_size), float("nan"), dtype=key.dtype
    )
    key_pages, value_pages = cpu.split_pages(cache)
    for token in range(num_tokens):
        block, offset = int(blocks[token // BLOCK_SIZE]), token % BLOCK_SIZE
        key_pages[block, :, :, offset] = key[:, token]
        value_pages[block, :, offset] = value[:, token]
    return cache


def make_inputs(
    window: int, prompt: int, num_kv_heads: int, group: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(prompt)
    query = torch.randn(window, num_kv_heads * group, head_size, generator=generator).to(dtype)
    key = torch.randn(num_kv_heads, prompt, head_size, generator=generator).to(dtype)
    value = torch.randn(num_kv_heads, prompt, head_size, generator=generator).to(dtype)
    num_blocks = -(-prompt // BLOCK_SIZE)
    blocks = torch.randperm(num_blocks + 5, generator=generator)[:num_blocks].to(torch.int32)
    return query, key, value, blocks, make_cache(key, value, blocks, num_blocks + 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "prompt", "num_kv_heads", "group", "head_size"), SHAPES)
def test_window_sum_equals_the_definition(
    window: int, prompt: int, num_kv_heads: int, group: int, head_size: int, dtype: torch.dtype
) -> None:
    query, key, _, blocks, cache = make_inputs(
        window, prompt, num_kv_heads, group, head_size, dtype
    )
    keys = cpu.gather_keys(cpu.split_pages(cache)[0], blocks, prompt)
    assert torch.equal(keys, key.transpose(1, 2))

    scores = cpu.window_sum(query, keys, head_size**-0.5)

    expected = reference.window_sum(query, key, head_size**-0.5)
    assert scores.shape == (num_kv_heads, group, prompt - window)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


def test_window_sum_takes_heads_in_turn_above_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, _, _, _ = make_inputs(32, 500, 3, 3, 64, torch.float32)
    whole = cpu.window_sum(query, key.transpose(1, 2), 0.125)
    monkeypatch.setattr(cpu, "MAX_SCORE_BYTES", 1)

    torch.testing.assert_close(cpu.window_sum(query, key.transpose(1, 2), 0.125), whole)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_huge_logits_stay_finite(scale: float) -> None:
    query, key, _, _, _ = make_inputs(16, 100, 2, 2, 64, torch.float32)
    query, key = 1e3 * query, 1e3 * key

    scores = cpu.window_sum(query, key.transpose(1, 2), scale)

    assert torch.isfinite(scores).all()
    # An error in a logit is one in its weight, relative; logits round at their own size.
    largest_logit = 1e6 * scale * 64
    tolerance = largest_logit * torch.finfo(torch.float32).eps
    expected = reference.window_sum(query, key, scale)
    torch.testing.assert_close(scores, expected, rtol=tolerance, atol=16 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("prompt", "start", "num_keep"),
    [(100, 32, 36), (300, 160, 108), (300, 32, 256), (289, 256, 1), (320, 256, 32), (64, 32, 0)],
)
def test_compaction_equals_the_definition(
    prompt: int, start: int, num_keep: int, dtype: torch.dtype
) -> None:
    _, key, value, blocks, cache = make_inputs(1, prompt, 3, 1, 64, dtype)
    generator = torch.Generator().manual_seed(7)
    positions = torch.stack(
        [torch.randperm(prompt, generator=generator)[:num_keep].sort().values for _ in range(3)]
    )
    key_pages, value_pages = cpu.split_pages(cache)
    keys = cpu.gather_keys(key_pages, blocks, prompt)

    cpu.compact(key_pages, value_pages, keys, blocks, positions, start)

    expected = make_cache(
        reference.compact(key, positions, start),
        reference.compact(value, positions, start),
        blocks,
        cache.shape[0],
    )
    # Other requests' blocks and the unwritten slots keep their NaN.
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
