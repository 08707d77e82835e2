"""PyramidKV (Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

from kvsieve.core.config import SieveConfig
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.snapkv import window_attention


def build(config: SieveConfig) -> Policy:
    """SnapKV's steps; lower layers keep more than higher ones.

    Defaults are those of the authors' LongBench runs (window 8, max pooling of 7). The pyramid is
    a matter of budgets, not of ranking: `layer_budgets` plans it.

    Deviations: those of SnapKV here (float32 sums, heads of a group averaged before pooling, a
    few sinks forced).
    """
    return Policy.with_settings(config, window_attention)


PYRAMIDKV = Method(
    name="pyramidkv",
    summary="SnapKV with budgets that shrink from the first layers to the last",
    source="arXiv 2406.02069",
    sees_question=True,
    build=build,
    defaults={
        "observation_window": 8,
        "pooling": "max",
        "pool_size": 7,
        "num_sink_tokens": 4,
        "layer_budgets": "pyramid",
    },
)
