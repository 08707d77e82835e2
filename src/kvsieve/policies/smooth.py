"""Smooth: pool scores over neighbouring positions, so that kept tokens come in runs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Pooling = Literal["max", "avg"]


def smooth(scores: torch.Tensor, pooling: Pooling, pool_size: int) -> torch.Tensor:
    """Centred pooling with stride 1 over positions; the length stays the same.

    SnapKV (arXiv 2404.14469) pools with zero padding in "avg" (the padding counts in
    the mean, so both edges are damped) and with minus infinity in "max". A number that is
    none stays where it is and counts for no neighbour.

    Args:
        scores: [..., n] float32, at least one dimension before the last.
        pooling: "max" or "avg".
        pool_size: Width in tokens, odd; 1 changes nothing.

    Returns:
        The same shape, float32.
    """
    if pool_size == 1 or scores.numel() == 0:
        return scores
    padding = pool_size // 2
    broken = scores.isnan()
    whole = scores.masked_fill(broken, float("-inf") if pooling == "max" else 0.0)
    batched = whole.flatten(0, -2).unsqueeze(0)
    if pooling == "max":
        # torch limits the padding of a max pool to half its width, which is what we use.
        pooled = F.max_pool1d(batched, pool_size, stride=1, padding=padding)
    else:
        pooled = F.avg_pool1d(batched, pool_size, stride=1, padding=padding)
    return pooled.view(scores.shape).masked_fill(broken, float("nan"))
