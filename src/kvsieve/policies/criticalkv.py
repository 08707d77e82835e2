"""CriticalKV (Feng et al. 2025, arXiv 2502.03805), over SnapKV."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_number
from kvsieve.policies.policy import Policy, Refine
from kvsieve.policies.snapkv import SNAPKV, window_attention

OPTIONS = {"first_stage_ratio": 0.5, "epsilon": 1e-4}


def two_stages(first_stage_ratio: float, epsilon: float, observation_window: int) -> Refine:
    """A part of the budget by the scores as they are, the rest weighted by what values do.

    Args:
        first_stage_ratio: That part, in [0, 1].
        epsilon: Added to a score before it is weighted, as if scores were means over the window.
        observation_window: Queries that the scores are sums over.
    """

    def refine(scores: torch.Tensor, evidence: Evidence, num_keep: int) -> torch.Tensor:
        num_candidates = scores.shape[1]
        # The recent tokens are no candidates, but part of the budget and the first of it.
        num_recent = evidence.num_tokens - num_candidates
        num_first = int((num_keep + num_recent) * first_stage_ratio) - num_recent
        window = min(observation_window, evidence.num_tokens)
        weighted = scores + epsilon * window
        weighted = weighted * evidence.output_norms()[:, :num_candidates]
        # Those of the first stage stand above all others, in their own order.
        ordered = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"))
        ranks = ordered.argsort(dim=1, stable=True).argsort(dim=1)
        highest = torch.finfo(scores.dtype).max
        first = highest * (2.0 + ranks.double())
        is_first = ranks >= num_candidates - max(0, num_first)
        return torch.where(is_first, first, weighted.clamp(max=highest).double())

    return refine


def build(config: SieveConfig) -> Policy:
    """SnapKV for half of the budget; for the rest, times how much the value adds to the output.

    Options:
        first_stage_ratio: Part of the budget, recent tokens included, that goes by the scores
            alone.
        epsilon: What is added to a score before it is weighted, in [0, 1]: a score is at most 1.

    As kvpress computes it. Deviations: those of SnapKV here (max pooling of 7 over a window of
    32, a few sinks forced).
    """
    ratio = read_number(config, OPTIONS, "first_stage_ratio", at_least=0, at_most=1)
    epsilon = read_number(config, OPTIONS, "epsilon", at_least=0, at_most=1)
    return Policy.with_settings(
        config,
        window_attention,
        refine=two_stages(ratio, epsilon, config.observation_window),
        looks_at=frozenset({"output_norms"}),
    )


CRITICALKV = Method(
    name="criticalkv",
    summary="SnapKV, half of the budget weighted by what values add to the output",
    source="arXiv 2502.03805",
    sees_question=True,
    build=build,
    defaults=SNAPKV.defaults,
    options=OPTIONS,
)
