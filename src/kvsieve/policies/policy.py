"""A policy as data: which step functions run, with which parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Accumulator, Evidence
from kvsieve.policies.protect import protect
from kvsieve.policies.reduce import HeadReduction, mean_of_group
from kvsieve.policies.select import select_positions
from kvsieve.policies.smooth import Pooling, smooth

Score = Callable[[Evidence], torch.Tensor]
"""[num_kv_heads, num_queries_per_kv or 1, n] float32: the higher, the more a token matters."""

Sight = Literal["keys", "values", "key_redundancy", "output_norms", "rotary"]
"""What may be asked of the evidence, or (`rotary`) of a chunk, beside attention."""

Refine = Callable[[torch.Tensor, Evidence, int], torch.Tensor]
"""From scores [num_kv_heads, n], evidence and the number to keep to scores of the same shape."""


@dataclass(frozen=True)
class Policy:
    """How the tokens of a prompt are ranked and chosen, per KV head, in separate steps.

    score, (smooth), reduce heads, smooth, refine, protect, select. How many are kept is no part
    of it: that is the budget's (`core.budget`).

    Attributes:
        name: The published method's name, as in `policy` of the configuration.
        score: One score per query head (or KV head) and position.
        observation_window: Last queries of the prompt that are watched, in tokens. What their
            attention loses is reported whether or not the score looks at it.
        num_recent_tokens: Last tokens of the prompt that are always kept. They are no
            candidates: smoothing does not reach into them.
        num_sink_tokens: First tokens of the prompt that are always kept.
        recent_share: Share of what is kept that goes to the last tokens, if that is more than
            `num_recent_tokens` (H2O's half).
        reduce: How the heads of a group become one score.
        pooling: Kind of smoothing over neighbouring positions.
        pool_size: Width of the smoothing, in tokens, odd; 1 for none.
        pools_heads: Whether every query head is smoothed by itself, before heads are reduced.
        refine: A last word on the scores, with all the evidence; None for none.
        accumulator: What is gathered from every query of the prompt; None for nothing.
        looks_at: What the policy asks the evidence (or a chunk) for beside attention.
            Memory is set aside for it at start-up, and what the model cannot show is refused.
    """

    name: str
    score: Score
    observation_window: int = 32
    num_recent_tokens: int = 32
    num_sink_tokens: int = 0
    recent_share: float = 0.0
    reduce: HeadReduction = mean_of_group
    pooling: Pooling = "max"
    pool_size: int = 1
    pools_heads: bool = False
    refine: Refine | None = None
    accumulator: Accumulator | None = None
    looks_at: frozenset[Sight] = frozenset()

    @classmethod
    def with_settings(cls, config: SieveConfig, score: Score, **steps: Any) -> Policy:
        """A policy with everything that the configuration says, and a method's own steps.

        Args:
            config: Its `policy`, observation window, recent and sink tokens, and pooling are
                taken over.
            score: The method's score.
            steps: Other attributes, by name.
        """
        return cls(
            name=config.policy,
            score=score,
            observation_window=config.observation_window,
            num_recent_tokens=config.recent_tokens,
            num_sink_tokens=config.num_sink_tokens,
            pooling=config.pooling,
            pool_size=config.pool_size,
            **steps,
        )

    def choose(
        self, evidence: Evidence, num_keep: int, spans: Sequence[tuple[int, int]] = ()
    ) -> torch.Tensor:
        """The positions of a prompt that one layer keeps.

        Args:
            evidence: What is known of the prompt in the layer.
            num_keep: Positions to keep per KV head, the recent ones among them.
            spans: Protected positions as (begin, end), end excluded.

        Returns:
            [num_kv_heads, num_keep] int64, ascending.

        Raises:
            ValueError: `num_keep` is not in [0, n].
        """
        scores = self.candidate_scores(evidence, num_keep)
        num_tokens, num_candidates = evidence.num_tokens, scores.shape[1]
        num_recent = num_tokens - num_candidates
        scores = protect(
            scores,
            self.num_sink_tokens,
            spans,
            int(self.recent_share * num_keep) - num_recent,
            num_keep - num_recent,
        )
        chosen = select_positions(scores, num_keep - num_recent)
        recent = torch.arange(num_candidates, num_tokens, device=chosen.device)
        return torch.cat([chosen, recent.expand(chosen.shape[0], -1)], dim=1)

    def candidate_scores(self, evidence: Evidence, num_keep: int) -> torch.Tensor:
        """The scores of all positions but the recent ones, as they are before protection.

        Args:
            evidence: What is known of the prompt in the layer.
            num_keep: Positions to keep per KV head, the recent ones among them.

        Returns:
            [num_kv_heads, n - num_recent], of a floating-point type.

        Raises:
            ValueError: `num_keep` is not in [0, n].
        """
        num_tokens = evidence.num_tokens
        if not 0 <= num_keep <= num_tokens:
            raise ValueError(f"num_keep must be in [0, {num_tokens}], got {num_keep}")
        num_recent = min(self.num_recent_tokens, num_keep)
        head_scores = self.score(evidence)[..., : num_tokens - num_recent]
        if self.pools_heads:
            head_scores = smooth(head_scores, self.pooling, self.pool_size)
        scores = self.reduce(head_scores, num_keep - num_recent)
        if not self.pools_heads:
            scores = smooth(scores, self.pooling, self.pool_size)
        if self.refine is not None:
            scores = self.refine(scores, evidence, num_keep - num_recent)
        return scores
