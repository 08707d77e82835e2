"""Compaction of the CPU cache against the definition, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from kvsieve.kernels import cpu, reference

BLOCK_SIZE = 32


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
