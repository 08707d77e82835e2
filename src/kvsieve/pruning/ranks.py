"""Rank stability: how much the ranks of tokens still move from layer to layer.

ASL (arXiv 2601.07667) prunes a prompt at the first layer where they have settled.
"""

from __future__ import annotations

import torch


def layer_ranks(scores: torch.Tensor) -> torch.Tensor:
    """Rank of every position by a layer's scores.

    Args:
        scores: [n] float32, the higher the better; a score that is no number ranks last.

    Returns:
        [n] float32 ranks, 1 for the best. Ties go to the higher position, as in the policies.
    """
    n = len(scores)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = n - 1 - scores.flip(0).argsort(descending=True, stable=True)
    ranks = torch.empty(n, device=scores.device)
    ranks[order] = torch.arange(1, n + 1, dtype=torch.float32, device=scores.device)
    return ranks


def rank_variance(ranks: torch.Tensor, num_ranked: int) -> torch.Tensor:
    """How much ranks differ between layers, over the tokens that are best in any of them.

    Args:
        ranks: [observed_layers, n] ranks of the positions in each layer, 1 for the best.
        num_ranked: Best positions of each layer that count, at least 1.

    Returns:
        Scalar float64 on the ranks' device: the variance over layers (population) of a position's
        rank, averaged over the union of the layers' best positions.
    """
    union = (ranks <= num_ranked).any(dim=0)
    variance = ranks.double().var(dim=0, unbiased=False)
    return (variance * union).sum() / union.sum()
