"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) as a sieve of prompts."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy


def recency(evidence: Evidence) -> torch.Tensor:
    """The later, the better: [num_kv_heads, 1, n]."""
    # The window's attention tells the device; it is computed anyway, for what is reported lost.
    device = evidence.window_attention().device
    # float64 tells positions beyond 2**24 apart.
    order = torch.arange(evidence.num_tokens, dtype=torch.float64, device=device)
    return order.expand(evidence.num_kv_heads, 1, -1)


def build(config: SieveConfig) -> Policy:
    """The first tokens and the last ones.

    Deviations: keys keep their positions in the prompt (the authors number them anew within
    the cache), and what was decoded is never dropped.
    """
    return Policy.with_settings(config, recency)


STREAMING_LLM = Method(
    name="streaming_llm",
    summary="The first tokens and the last ones, whatever they say",
    source="arXiv 2309.17453",
    sees_question=False,
    build=build,
    defaults={"num_sink_tokens": 4, "pool_size": 1},
)
