"""Ada-SnapKV (Feng et al. 2024, arXiv 2407.11550), as far as equal lengths allow."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_number
from kvsieve.policies.policy import Policy
from kvsieve.policies.reduce import HeadReduction, weigh_heads
from kvsieve.policies.select import select_positions
from kvsieve.policies.snapkv import SNAPKV, window_attention

OPTIONS = {"alpha": 0.5}


def head_quotas(head_scores: torch.Tensor, num_keep: int, alpha: float) -> torch.Tensor:
    """Ada-KV's quota of every query head, in tokens, not rounded.

    The best `num_heads * num_keep` entries of all heads together are found. A head's quota is
    halfway (at alpha 0.5) between how many of them are its own and `num_keep`.

    Args:
        head_scores: [num_kv_heads, num_queries_per_kv, n] float32.
        num_keep: What every head would get if all got the same, in tokens.
        alpha: Share of `num_keep` that every head is sure of, in [0, 1].

    Returns:
        [num_kv_heads, num_queries_per_kv] float32, of mean `min(num_keep, n)` or between it and
        `num_keep`.
    """
    num_kv_heads, group, num_positions = head_scores.shape
    num_heads = num_kv_heads * group
    best = select_positions(
        head_scores.reshape(1, -1), num_heads * max(0, min(num_keep, num_positions))
    )
    own = torch.bincount(best[0] // max(1, num_positions), minlength=num_heads)
    return (own.view(num_kv_heads, group) * (1 - alpha) + num_keep * alpha).float()


def weighted_by_quota(alpha: float) -> HeadReduction:
    """The sum over a group, each head weighted with its part of the group's quotas."""

    def reduce(head_scores: torch.Tensor, num_keep: int) -> torch.Tensor:
        return weigh_heads(head_scores, head_quotas(head_scores, num_keep, alpha)).sum(dim=1)

    return reduce


def build(config: SieveConfig) -> Policy:
    """SnapKV, in which a query head whose attention is spread counts for more in its group.

    Options:
        alpha: Share of the budget that every head is sure of (the authors' floor).

    Deviations: Ada-KV gives every head a length of its own. Paged caches of one length per
    layer cannot hold that: **every head keeps the same number of tokens here**, and the quotas
    only weigh the query heads of a group against one another. With one query head per KV head
    nothing of Ada-KV is left, and this is SnapKV. Quotas are not rounded. Sinks are forced.
    """
    alpha = read_number(config, OPTIONS, "alpha", at_least=0, at_most=1)
    return Policy.with_settings(
        config, window_attention, reduce=weighted_by_quota(alpha), pools_heads=True
    )


ADAKV = Method(
    name="adakv",
    summary="SnapKV, query heads weighted by Ada-KV's quotas within their group",
    source="arXiv 2407.11550",
    sees_question=True,
    build=build,
    defaults=SNAPKV.defaults,
    options=OPTIONS,
)
