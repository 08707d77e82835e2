"""kvsieve's own composition of published steps, chosen by a search (docs/policies.md)."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def squared_attention(evidence: Evidence) -> torch.Tensor:
    """Squares of the window's attention, summed: [num_kv_heads, num_queries_per_kv, n].

    Squares let one query that looks hard at a token outweigh many that glance at it
    (KV-Compress, arXiv 2410.00161).
    """
    return evidence.window_attention(power=2)


def build(config: SieveConfig) -> Policy:
    """Squared attention of the last queries, averaged over a wide neighbourhood.

    KV-Compress's score with SnapKV's steps: heads of a group averaged, then average pooling
    over 21 tokens, so that what surrounds a needle is kept with it. Fewer of the last tokens
    are forced than are watched: where a budget is small, the window itself need not fill it.
    """
    return Policy.with_settings(config, squared_attention)


KVSIEVE = Method(
    name="kvsieve",
    summary="Squared attention of the last queries, averaged over a wide neighbourhood",
    source="docs/policies.md",
    sees_question=True,
    build=build,
    defaults={
        "observation_window": 32,
        "num_recent_tokens": 8,
        "pooling": "avg",
        "pool_size": 21,
        "num_sink_tokens": 4,
    },
)
