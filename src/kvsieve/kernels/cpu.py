"""Scoring and compaction on vLLM's CPU attention cache (isa `vec` and `vec16`).

In each (block, KV head) page the keys lie transposed, `[head_size, block_size]`,
and the values as `[block_size, head_size]`. `engine/backends/cpu.py` checks that at
start-up against the stock cache-write op.
"""

from __future__ import annotations

import torch

MAX_SCORE_BYTES = 64 * 2**20
"""Bound on the logits held at once by `window_sum`, in bytes. Above it the KV heads
are taken in turn, so the bound is exceeded only where one head's window needs more."""


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


def window_sum(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`reference.window_sum` for transposed keys, in one pass of three matrix products.

    Args:
        query: [window, num_heads, head_size].
        keys: [num_kv_heads, head_size, num_tokens], as from `gather_keys`.
        scale: Softmax scale.

    Returns:
        [num_kv_heads, num_queries_per_kv, num_tokens - window] float32.
    """
    window, num_heads, head_size = query.shape
    num_kv_heads, _, num_tokens = keys.shape
    group = num_heads // num_kv_heads
    grouped = query.float().mul(scale).view(window, num_kv_heads, group, head_size)
    grouped = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, group * window, head_size)
    num_old = num_tokens - window
    if num_old == 0:
        return torch.empty((num_kv_heads, group, 0), dtype=torch.float32, device=keys.device)
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    heads_at_once = max(1, MAX_SCORE_BYTES // (group * window * num_tokens * 4))
    scores = torch.empty((num_kv_heads, group, num_old), dtype=torch.float32, device=keys.device)
    for first in range(0, num_kv_heads, heads_at_once):
        heads = slice(first, min(first + heads_at_once, num_kv_heads))
        logits = torch.bmm(grouped[heads], keys[heads].float())
        logits = logits.view(-1, window, num_tokens)
        logits[:, :, num_old:].masked_fill_(future, float("-inf"))
        logits -= logits.amax(dim=-1, keepdim=True)
        weights = logits.exp_()
        # Normalising and summing over the window is one product with 1/denominator.
        inverse = weights.sum(dim=-1).reciprocal_().unsqueeze(1)
        torch.bmm(inverse, weights[:, :, :num_old], out=scores[heads].view(-1, 1, num_old))
    return scores


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


def scratch_bytes(
    window: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    item_bytes: int,
    num_tokens: int,
) -> int:
    """Bytes that scoring and compacting one prompt in one layer hold at once, at most.

    Args:
        window: Queries of the observation window.
        num_heads: Query heads of the layer.
        num_kv_heads: KV heads of the layer.
        head_size: Size of a head.
        item_bytes: Bytes of one cache element.
        num_tokens: Length of the prompt, in tokens.
    """
    row = num_kv_heads * num_tokens * head_size
    # Gathered keys, at first as pages and transposed; then a float copy (where the cache is no
    # float already) and the logits of the KV heads that are scored at once, and all scores.
    # Compaction comes after the logits are gone and gathers keys and values once more.
    gathered = row * item_bytes
    one_head = num_heads // num_kv_heads * window * num_tokens * 4
    heads_at_once = max(1, min(num_kv_heads, MAX_SCORE_BYTES // max(1, one_head)))
    float_keys = 0 if item_bytes == 4 else heads_at_once * head_size * num_tokens * 4
    scored = heads_at_once * one_head + float_keys + 2 * num_heads * num_tokens * 4
    moved = 2 * row * item_bytes + 40 * num_kv_heads * num_tokens
    return gathered + max(gathered, scored, moved)
