"""Novita AI's layer-wise sparsity (vLLM RFC #10942, December 2024)."""

from __future__ import annotations

from kvsieve.core.config import SieveConfig
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.snapkv import window_attention


def build(config: SieveConfig) -> Policy:
    """The first three layers keep everything, every other one the same number of tokens.

    Ranked by PyramidKV's score over the last 256 queries (the window of the authors' example),
    with its pooling.

    Deviations: the authors' layers go on replacing the token of the lowest score while text is
    decoded; here the choice is made once, when the prompt was read, and what is decoded stays.
    Their code was not published, so pooling and what is always kept are PyramidKV's, and the
    forced sinks ours.
    """
    return Policy.with_settings(config, window_attention)


LAYERWISE = Method(
    name="layerwise",
    summary="SnapKV's score over a wide window; the first three layers keep everything",
    source="vLLM RFC #10942",
    sees_question=True,
    build=build,
    defaults={
        "full_layers": 3,
        "observation_window": 256,
        "pooling": "max",
        "pool_size": 7,
        "num_sink_tokens": 4,
    },
)
