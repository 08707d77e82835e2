"""Select: the best positions of each head, deterministically."""

from __future__ import annotations

import torch


def select_positions(scores: torch.Tensor, num_keep: int) -> torch.Tensor:
    """Positions of the `num_keep` highest scores of each head, in ascending order.

    Ties go to the higher position, whatever order the device's top-k visits them in.
    A score that is not a number counts as the lowest: a broken token must not push
    out a sound one.

    Args:
        scores: [num_kv_heads, n] float32.
        num_keep: Positions to keep per head, in [0, n].

    Returns:
        [num_kv_heads, num_keep] int64, ascending.

    Raises:
        ValueError: `num_keep` is out of range.
    """
    num_heads, num_positions = scores.shape
    if not 0 <= num_keep <= num_positions:
        raise ValueError(f"num_keep must be in [0, {num_positions}], got {num_keep}")
    if num_keep == 0:
        return torch.empty((num_heads, 0), dtype=torch.int64, device=scores.device)
    scores = torch.nan_to_num(scores, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    threshold = torch.topk(scores, num_keep, dim=1, sorted=True).values[:, -1:]
    above = scores > threshold
    tied = scores == threshold
    num_from_ties = num_keep - above.sum(dim=1, keepdim=True)
    # Rank ties from the right: the last tied position has rank 1.
    rank_from_right = tied.flip(1).cumsum(1).flip(1)
    keep = above | (tied & (rank_from_right <= num_from_ties))
    # nonzero visits rows in order, so the positions come out ascending per head.
    return keep.nonzero()[:, 1].view(num_heads, num_keep)
