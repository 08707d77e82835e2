"""Reduce heads: from one score per query head to one per KV head."""

from __future__ import annotations

from collections.abc import Callable

import torch

HeadReduction = Callable[[torch.Tensor, int], torch.Tensor]
"""From scores [num_kv_heads, num_queries_per_kv or 1, n] float32 and the number of positions
that will be kept to [num_kv_heads, n].

The published code of most methods repeats K and V to the query heads and so stores a GQA cache
several times over; reducing first keeps the cache at KV-head size.
"""


def mean_of_group(head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
    """The mean over the query heads of a group."""
    return head_scores.mean(dim=1)


def sum_of_group(head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
    """The sum over the query heads of a group."""
    return head_scores.sum(dim=1)


def max_of_group(head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
    """The highest score of the query heads of a group."""
    return head_scores.amax(dim=1)


def mean_of_all(head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
    """The mean over every query head of the layer: all KV heads keep the same positions."""
    return head_scores.mean(dim=(0, 1)).expand(head_scores.shape[0], -1)


def weigh_heads(head_scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply every query head with its part of its group's weight.

    Args:
        head_scores: [num_kv_heads, num_queries_per_kv, n] float32.
        weights: [num_kv_heads, num_queries_per_kv], at least 0. Where a whole group has none its
            heads count alike.

    Returns:
        The shape of `head_scores`. A head of weight 0 scores 0, whatever its numbers are.
    """
    total = weights.sum(dim=1, keepdim=True)
    part = torch.where(total > 0, weights / total, 1 / weights.shape[1]).unsqueeze(2)
    return torch.where(part > 0, part * head_scores, 0.0)
