"""SnapKV (Li et al. 2024, arXiv 2404.14469)."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def window_attention(evidence: Evidence) -> torch.Tensor:
    """The attention of the window's queries, summed: [num_kv_heads, num_queries_per_kv, n]."""
    return evidence.window_attention()


def build(config: SieveConfig) -> Policy:
    """The attention of the last queries, pooled over neighbours, best first.

    Defaults are those of the authors' LongBench runs (window 32, max pooling of 7).
    Deviations: scores are summed in float32 (theirs in the model's type), heads of a query
    group are averaged before pooling (theirs repeats K and V), and a few sinks are forced
    (theirs forces none).
    """
    return Policy.with_settings(config, window_attention)


SNAPKV = Method(
    name="snapkv",
    summary="Attention of the last queries, pooled over neighbours",
    source="arXiv 2404.14469",
    sees_question=True,
    build=build,
    defaults={
        "observation_window": 32,
        "pooling": "max",
        "pool_size": 7,
        "num_sink_tokens": 4,
    },
)
