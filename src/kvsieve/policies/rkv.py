"""R-KV (Cai et al. 2025, arXiv 2505.24133), for prompts."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_number
from kvsieve.policies.policy import Policy, Refine

OPTIONS = {"mix_lambda": 0.1}


def importance(evidence: Evidence) -> torch.Tensor:
    """R-KV's importance, [num_kv_heads, 1, n]; 0 in the window, whose tokens are all kept."""
    mean = evidence.grouped_window_mean()
    window = evidence.num_tokens - mean.shape[1]
    return torch.nn.functional.pad(mean, (0, window)).unsqueeze(1)


def less_redundancy(mix_lambda: float) -> Refine:
    """Lambda * importance - (1 - lambda) * redundancy."""

    def refine(scores: torch.Tensor, evidence: Evidence, num_keep: int) -> torch.Tensor:
        redundancy = evidence.key_redundancy()[:, : scores.shape[1]]
        return mix_lambda * scores - (1 - mix_lambda) * redundancy

    return refine


def build(config: SieveConfig) -> Policy:
    """Tokens that matter to the last queries and that no later key repeats.

    Options:
        mix_lambda: Weight of importance against redundancy. The authors' README says 0.1, their
            code 0.07.

    Deviations: the authors compress what is decoded, every 128 tokens; here the prompt is, once.
    Redundancy compares all pairs of keys: its time grows with the square of the prompt.
    """
    if config.recent_tokens < config.observation_window:
        raise ConfigError(
            [
                f"num_recent_tokens ({config.recent_tokens}) must be at least observation_window"
                f" ({config.observation_window}): rkv has no score for the tokens of its window"
            ]
        )
    mix_lambda = read_number(config, OPTIONS, "mix_lambda", at_least=0, at_most=1)
    return Policy.with_settings(
        config,
        importance,
        refine=less_redundancy(mix_lambda),
        looks_at=frozenset({"key_redundancy"}),
    )


RKV = Method(
    name="rkv",
    summary="Attention of the last queries, less what later keys repeat",
    source="arXiv 2505.24133",
    sees_question=True,
    build=build,
    defaults={
        "observation_window": 8,
        "pooling": "max",
        "pool_size": 7,
        "num_sink_tokens": 4,
    },
    options=OPTIONS,
)
