"""Chance: the first tokens, the last ones, and any others. What a method must beat."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def chance(evidence: Evidence) -> torch.Tensor:
    """Random numbers: [num_kv_heads, 1, n].

    They depend on the number of heads and of positions alone, so that a run can be repeated;
    all layers have the same.
    """
    shape = (evidence.num_kv_heads, 1, evidence.num_tokens)
    # Drawn on the CPU, so that every device has the same.
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(evidence.num_tokens))
    return numbers.to(evidence.window_attention().device)


def build(config: SieveConfig) -> Policy:
    """Sinks, the last tokens, and chance."""
    return Policy.with_settings(config, chance)


RANDOM = Method(
    name="random",
    summary="Chance, to compare with",
    source="",
    sees_question=False,
    build=build,
    defaults={"num_sink_tokens": 4, "pool_size": 1},
)
