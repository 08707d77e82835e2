"""The formulas of pruning in prefill: pure functions over dense tensors of one layer.

Written from the published definitions and nothing else; `prune_oracle` runs a model around them.
Queries q [num_heads, P, d] and keys k [num_kv_heads, P, d] are rotated; query head h reads KV head
h // (num_heads // num_kv_heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from .snapkv_formula import window_attention

Pool = tuple[Literal["avg", "max"], int]
"""Kind of pooling and its odd width in positions."""


def pooled(scores: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Scores [rows, n] over neighbours: beyond an edge "avg" counts zeros, "max" nothing."""
    kind, size = pool
    pooling = F.avg_pool1d if kind == "avg" else F.max_pool1d
    return pooling(scores, size, stride=1, padding=size // 2)


def window_score(
    q: torch.Tensor, k: torch.Tensor, scaling: float, window: int, pool: Pool
) -> torch.Tensor:
    """Shared score [P - W] of ASL and FastKV.

    The attention mass of the last W queries, pooled per query head, summed over all query heads.
    """
    mass = window_attention(q[:, -window:], k, scaling).sum(dim=1)
    return pooled(mass[:, : k.shape[1] - window], pool).sum(dim=0)


def gemfilter_score(q: torch.Tensor, k: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Shared score [P] of GemFilter: the last query's bare products, summed over heads, pooled."""
    keys = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    products = (keys * q[:, -1:]).sum(dim=2)
    return pooled(products.sum(dim=0, keepdim=True), pool)[0]


def policy_score(
    q: torch.Tensor, k: torch.Tensor, scaling: float, window: int, pool: Pool, recent: int
) -> torch.Tensor:
    """SnapKV's score [num_kv_heads, P - recent] of a layer that saw the whole prompt.

    The mean attention of the last `window` queries, averaged over the query heads of a group, then
    pooled. A query gives nothing to the positions after it, which counts in the mean.
    """
    num_kv_heads, prompt_len, _ = k.shape
    mean = window_attention(q[:, -window:], k, scaling).mean(dim=1)[:, : prompt_len - recent]
    return pooled(mean.unflatten(0, (num_kv_heads, -1)).mean(dim=1), pool)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Ranks [n] of [n] scores, int64: 1 is the best; of equals the higher position is better."""
    n = len(scores)
    order = n - 1 - scores.flip(0).argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter(0, order, torch.arange(1, n + 1, device=order.device))


def rank_variance(observed: Sequence[torch.Tensor], best: int) -> float:
    """ASL's statistic: how much tokens move in the order from layer to layer.

    Args:
        observed: ranks [n], one tensor per layer.
        best: a token counts if it is among this many best in any of the layers.

    Returns:
        The mean over the tokens that count of the population variance over the layers, float64.
    """
    table = torch.stack(list(observed)).double()
    counts = (table <= best).any(dim=0)
    return float(table[:, counts].var(dim=0, correction=0).mean())
