"""Mass: how much of the window's attention went to what is dropped."""

from __future__ import annotations

import torch


def attention_mass_lost(
    head_scores: torch.Tensor, positions: torch.Tensor, window: int
) -> torch.Tensor:
    """Share of the window's attention that went to positions that are not kept.

    Each of the window's queries spreads a softmax weight of 1 over the prompt, so the sum
    over the window of the weight on dropped positions, divided by `window`, is a share.

    Args:
        head_scores: [num_kv_heads, num_queries_per_kv, n] float32, sums over the window of
            the softmax weights on each position before it.
        positions: [num_kv_heads, num_keep] int64, the positions that are kept.
        window: Queries that were summed.

    Returns:
        Scalar float32 in [0, 1], the mean over all query heads.
    """
    index = positions.unsqueeze(1).expand(-1, head_scores.shape[1], -1)
    kept = head_scores.gather(2, index).sum(dim=2)
    return ((head_scores.sum(dim=2) - kept) / window).mean().clamp_(0, 1)
