"""KeyDiff (Park et al. 2025, arXiv 2504.15364)."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def unit_keys(keys: torch.Tensor) -> torch.Tensor:
    """Keys divided by their L2 norm, in two steps, so that huge ones do not overflow."""
    tiny = torch.finfo(keys.dtype).tiny
    scaled = keys / keys.abs().amax(dim=-1, keepdim=True).clamp(min=tiny)
    return torch.nn.functional.normalize(scaled, dim=-1)


def key_difference(evidence: Evidence) -> torch.Tensor:
    """Minus the cosine between a key and the mean direction of all: [num_kv_heads, 1, n]."""
    unit = unit_keys(evidence.keys())
    # A broken key must spoil its own score and not the mean.
    anchor = unit.nan_to_num(0.0).mean(dim=1, keepdim=True)
    return -(unit * torch.nn.functional.normalize(anchor, dim=-1)).sum(dim=-1).unsqueeze(1)


def build(config: SieveConfig) -> Policy:
    """The keys that are least like the others. No query is looked at, nothing is forced.

    Deviations: all of the prompt is ranked at once, when it was read (the authors also evict
    block by block while a prompt is read).
    """
    return Policy.with_settings(config, key_difference, looks_at=frozenset({"keys"}))


KEYDIFF = Method(
    name="keydiff",
    summary="Keys that are least like the mean key",
    source="arXiv 2504.15364",
    sees_question=False,
    build=build,
    defaults={"num_recent_tokens": 0, "num_sink_tokens": 0, "pool_size": 1},
)
