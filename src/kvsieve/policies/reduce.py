"""Reduce heads: from one score per query head to one per KV head."""

from __future__ import annotations

from typing import Literal

import torch

HeadReduction = Literal["mean", "max"]


def reduce_heads(head_scores: torch.Tensor, reduction: HeadReduction) -> torch.Tensor:
    """One score per KV head from the scores of its query group.

    SnapKV's own code repeats K and V to the query heads and so stores a GQA cache
    several times over; reducing first keeps the cache at KV-head size.

    Args:
        head_scores: [num_kv_heads, num_queries_per_kv, n] float32.
        reduction: "mean" or "max" over the group.

    Returns:
        [num_kv_heads, n] float32.
    """
    if reduction == "mean":
        return head_scores.mean(dim=1)
    return head_scores.amax(dim=1)
