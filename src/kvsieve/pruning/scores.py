"""One score per token for a whole layer: what the kept tokens are chosen by."""

from __future__ import annotations

import torch

from kvsieve.policies import Evidence
from kvsieve.policies.smooth import Pooling, smooth
from kvsieve.pruning.settings import PruneSettings


def layer_scores(
    evidence: Evidence, settings: PruneSettings, last_query: torch.Tensor
) -> torch.Tensor:
    """The score of every candidate position.

    Args:
        evidence: The prompt in this layer, with the last `settings.window` queries.
        settings: The method's parameters.
        last_query: [num_heads, head_size], the prompt's last query, rotary embedding applied.

    Returns:
        [n] float32. Scored by a window, the candidates end before it; scored by the last query,
        they are all positions.
    """
    if settings.method.scores_by == "last_query":
        keys = evidence.keys()
        grouped = last_query.float().view(keys.shape[0], -1, keys.shape[2]).sum(dim=1)
        scores = torch.einsum("gd,gnd->n", grouped, keys)
        return smooth(scores[None], settings.pooling, settings.pool_size)[0]
    attention = evidence.window_attention()
    num_candidates = max(0, evidence.num_tokens - settings.window)
    heads = attention.flatten(0, 1)[:, :num_candidates]
    return pooled_sum(heads, settings.pooling, settings.pool_size)


def pooled_sum(heads: torch.Tensor, pooling: Pooling, pool_size: int) -> torch.Tensor:
    """Scores of all heads, pooled over neighbours and summed: [num_heads, n] to [n] float32."""
    return smooth(heads, pooling, pool_size).sum(dim=0)
