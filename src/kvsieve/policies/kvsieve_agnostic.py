"""kvsieve's own composition for prompts whose question is not known yet (docs/policies.md)."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.keydiff import key_difference
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def weighty_difference(evidence: Evidence) -> torch.Tensor:
    """How unlike the mean key a key is, times the norm of its value: [num_kv_heads, 1, n].

    1 less the cosine is at least 0, so that a large value counts for a token and never against.
    """
    norms: torch.Tensor = torch.linalg.vector_norm(evidence.values(), dim=-1).unsqueeze(1)
    return (1 + key_difference(evidence)) * norms


def build(config: SieveConfig) -> Policy:
    """KeyDiff's score times the value's norm, averaged over neighbours. No query is looked at."""
    return Policy.with_settings(config, weighty_difference, looks_at=frozenset({"keys", "values"}))


KVSIEVE_AGNOSTIC = Method(
    name="kvsieve_agnostic",
    summary="Keys unlike the mean key with large values, averaged over neighbours",
    source="docs/policies.md",
    sees_question=False,
    build=build,
    defaults={
        "num_recent_tokens": 8,
        "pooling": "avg",
        "pool_size": 11,
        "num_sink_tokens": 4,
    },
)
