"""KV-Compress (Rehg 2024, arXiv 2410.00161), its score."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.reduce import sum_of_group
from kvsieve.policies.snapkv import SNAPKV


def squared_attention(evidence: Evidence) -> torch.Tensor:
    """The squared attention of the window's queries, summed: [G, num_queries_per_kv, n]."""
    return evidence.window_attention(power=2)


def build(config: SieveConfig) -> Policy:
    """SnapKV with squared attention, pooled per query head, summed over the group.

    Deviations: every layer and head keeps the same number of tokens. The authors' budget is
    one for all layers and heads of a sequence and takes whole blocks where they cost least; that
    is left out. They also go on evicting while text is decoded.
    """
    return Policy.with_settings(config, squared_attention, reduce=sum_of_group, pools_heads=True)


KV_COMPRESS = Method(
    name="kv_compress",
    summary="Squared attention of the last queries, pooled per query head",
    source="arXiv 2410.00161",
    sees_question=True,
    build=build,
    defaults=SNAPKV.defaults,
)
