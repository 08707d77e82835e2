"""Baselines: rankings that look at no score, to compare the others with."""

from __future__ import annotations

from typing import Literal

import torch

Ranking = Literal["score", "recency", "random"]


def rank(ranking: Ranking, like: torch.Tensor) -> torch.Tensor:
    """Scores that put positions in an order of their own.

    Args:
        ranking: "recency": the later, the better. "random": an order per head that depends
            on the number of heads and positions alone, so that a run can be repeated; all
            layers have the same.
        like: [num_kv_heads, n], for the shape and the device.

    Returns:
        [num_kv_heads, n] float32.
    """
    num_heads, num_positions = like.shape
    if ranking == "recency":
        order = torch.arange(num_positions, dtype=torch.float32, device=like.device)
        return order.expand(num_heads, -1)
    generator = torch.Generator().manual_seed(num_positions)
    return torch.rand((num_heads, num_positions), generator=generator).to(like.device)
