"""Mass: how much of the window's attention went to what is dropped."""

from __future__ import annotations

import torch


def attention_mass_lost(window_attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Share of the window's attention that went to positions that are not kept.

    Each of the window's queries spreads a softmax weight of 1 over the prompt, so the weight on
    dropped positions, as a part of all of it, is a share.

    Args:
        window_attention: [num_kv_heads, num_queries_per_kv, n] float32, softmax weights on
            every position of the prompt, summed over the window.
        positions: [num_kv_heads, num_keep] int64, the positions that are kept.

    Returns:
        Scalar float32 in [0, 1], the mean over all query heads.
    """
    index = positions.unsqueeze(1).expand(-1, window_attention.shape[1], -1)
    kept = window_attention.gather(2, index).sum(dim=2)
    return (1 - kept / window_attention.sum(dim=2)).mean().clamp_(0, 1)
