"""A policy as data: which step functions run, with which parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvsieve.policies.baseline import Ranking, rank
from kvsieve.policies.protect import protect_sinks
from kvsieve.policies.reduce import HeadReduction, reduce_heads
from kvsieve.policies.select import select_positions
from kvsieve.policies.smooth import Pooling, smooth

ScoreKernel = Literal["window_sum"]


@dataclass(frozen=True)
class Policy:
    """How the tokens of a prompt are ranked and chosen, per KV head.

    Attributes:
        name: The published method's name, as in `policy` of the configuration.
        score: Name of the score kernel. "window_sum" is the softmax attention of the
            last `observation_window` queries, summed over those queries.
        observation_window: Last queries of the prompt, in tokens; always kept.
        head_reduction: How the query heads of a group become one score per KV head.
        pooling: Kind of smoothing over neighbouring positions.
        pool_size: Width of the smoothing, in tokens, odd.
        num_sink_tokens: First tokens of the prompt that are always kept.
        ranking: "score" takes the best scores; the baselines look at no score at all. What
            the window's attention loses is known of each.
    """

    name: str
    score: ScoreKernel
    observation_window: int
    head_reduction: HeadReduction
    pooling: Pooling
    pool_size: int
    num_sink_tokens: int
    ranking: Ranking = "score"

    def select(self, head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
        """Positions to keep among those before the observation window.

        Args:
            head_scores: [num_kv_heads, num_queries_per_kv, n] float32, one score per
                query head and candidate position.
            num_keep: Positions to keep per KV head.

        Returns:
            [num_kv_heads, num_keep] int64, ascending.

        Raises:
            ValueError: `num_keep` is not in [0, n].
        """
        if self.ranking == "score":
            scores = reduce_heads(head_scores, self.head_reduction)
            scores = smooth(scores, self.pooling, self.pool_size)
        else:
            scores = rank(self.ranking, head_scores[:, 0])
        scores = protect_sinks(scores, self.num_sink_tokens)
        return select_positions(scores, num_keep)
