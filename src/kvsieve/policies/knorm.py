"""Key norms (Devoto et al. 2024, arXiv 2406.11430)."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def small_norm(evidence: Evidence) -> torch.Tensor:
    """Minus the L2 norm of a key: [num_kv_heads, 1, n]."""
    keys = evidence.keys()
    # Scaled first: the squares of huge keys overflow where their norm does not.
    largest = keys.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(keys.dtype).tiny)
    norms: torch.Tensor = torch.linalg.vector_norm(keys / largest, dim=-1, keepdim=True)
    return -(largest * norms).squeeze(-1).unsqueeze(1)


def build(config: SieveConfig) -> Policy:
    """The keys of the smallest norm. No query is looked at, nothing is forced.

    The authors leave the first two layers alone.
    """
    return Policy.with_settings(config, small_norm, looks_at=frozenset({"keys"}))


KNORM = Method(
    name="knorm",
    summary="Keys of the smallest norm",
    source="arXiv 2406.11430",
    sees_question=False,
    build=build,
    defaults={"full_layers": 2, "num_recent_tokens": 0, "num_sink_tokens": 0, "pool_size": 1},
)
