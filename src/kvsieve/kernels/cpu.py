"""Reading and compaction of vLLM's CPU attention cache (isa `vec` and `vec16`).

In each (block, KV head) page the keys lie transposed, `[head_size, block_size]`,
and the values as `[block_size, head_size]`. `engine/backends/cpu.py` checks that at
start-up against the stock cache-write op.
"""

from __future__ import annotations

import torch


def split_pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's cache as transposed keys and as values.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].

    Returns:
        Keys [num_blocks, num_kv_heads, head_size, block_size] and values
        [num_blocks, num_kv_heads, block_size, head_size], sharing memory.
    """
    num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
    head_size = double_head // 2
    pages = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * head_size)
    keys = pages[:, :, 0].unflatten(-1, (head_size, block_size))
    values = pages[:, :, 1].unflatten(-1, (block_size, head_size))
    return keys, values


def gather_keys(key_pages: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` keys of a request, transposed and contiguous.

    Args:
        key_pages: [num_blocks, num_kv_heads, head_size, block_size].
        blocks: [ceil(num_tokens / block_size)] int, physical blocks in order.
        num_tokens: Tokens wanted.

    Returns:
        [num_kv_heads, head_size, num_tokens] in the cache's dtype; a copy.
    """
    pages = key_pages[blocks]
    num_blocks, num_kv_heads, head_size, block_size = pages.shape
    keys = pages.permute(1, 2, 0, 3).reshape(num_kv_heads, head_size, num_blocks * block_size)
    return keys[:, :, :num_tokens]


def compact(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    start: int,
) -> None:
    """Move the kept K/V rows of one request, in place, to `[start, start + num_keep)`.

    Everything is gathered before anything is written: source and destination overlap.

    Args:
        key_pages: [num_blocks, num_kv_heads, head_size, block_size]; written.
        value_pages: [num_blocks, num_kv_heads, block_size, head_size]; written.
        keys: [num_kv_heads, head_size, num_tokens], the request's keys from `gather_keys`.
        blocks: Physical blocks of the request, in order, int.
        positions: [num_kv_heads, num_keep] int64, ascending.
        start: First position of the kept region, a multiple of the block size.
    """
    num_kv_heads, num_keep = positions.shape
    head_size, block_size = key_pages.shape[2], key_pages.shape[3]
    index = positions.unsqueeze(1).expand(-1, head_size, -1)
    kept_keys = keys.gather(2, index)
    heads = torch.arange(num_kv_heads, device=positions.device).unsqueeze(1)
    kept_values = value_pages[blocks[positions // block_size], heads, positions % block_size]

    num_whole, rest = divmod(num_keep, block_size)
    first_block = start // block_size
    whole = num_whole * block_size
    if num_whole:
        target = blocks[first_block : first_block + num_whole]
        key_pages[target] = (
            kept_keys[:, :, :whole].unflatten(2, (num_whole, block_size)).permute(2, 0, 1, 3)
        )
        value_pages[target] = (
            kept_values[:, :whole].unflatten(1, (num_whole, block_size)).permute(1, 0, 2, 3)
        )
    if rest:
        last = blocks[first_block + num_whole]
        key_pages[last, :, :, :rest] = kept_keys[:, :, whole:]
        value_pages[last, :, :rest] = kept_values[:, whole:]
