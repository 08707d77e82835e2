"""The definition of correct: dense, float32, one request and layer at a time."""

from __future__ import annotations

import torch


def window_sum(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention of the last prompt queries, summed over those queries.

    The denominator includes the window's own columns (causally masked); the result
    covers only the positions before the window. Section "window attention" of SnapKV.

    Args:
        query: [window, num_heads, head_size], the last `window` prompt queries with
            their rotary embedding applied.
        key: [num_kv_heads, num_tokens, head_size], the whole prompt's keys likewise.
        scale: Softmax scale, 1/sqrt(head_size) in most models.

    Returns:
        [num_kv_heads, num_queries_per_kv, num_tokens - window] float32.
    """
    window, num_heads, head_size = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    group = num_heads // num_kv_heads
    grouped = query.float().view(window, num_kv_heads, group, head_size)
    logits = torch.einsum("wkgd,knd->kgwn", grouped, key.float()) * scale
    query_position = torch.arange(num_tokens - window, num_tokens, device=key.device)
    hidden = torch.arange(num_tokens, device=key.device) > query_position[:, None]
    weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
    return weights[..., : num_tokens - window].sum(dim=2)


def compact(rows: torch.Tensor, positions: torch.Tensor, start: int) -> torch.Tensor:
    """Move the rows at `positions` to `[start, start + positions.shape[1])`.

    Args:
        rows: [num_kv_heads, num_tokens, head_size], keys or values; not changed.
        positions: [num_kv_heads, num_keep] int64, ascending.
        start: First row of the kept region.

    Returns:
        A copy of `rows` with the kept rows in place.
    """
    index = positions[..., None].expand(-1, -1, rows.shape[-1])
    moved = rows.clone()
    moved[:, start : start + positions.shape[1]] = rows.gather(1, index)
    return moved
