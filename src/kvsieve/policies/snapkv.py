"""SnapKV (Li et al. 2024, arXiv 2404.14469)."""

from __future__ import annotations

from kvsieve.policies.policy import Policy
from kvsieve.policies.smooth import Pooling


def snapkv(
    observation_window: int = 32,
    pooling: Pooling = "max",
    pool_size: int = 7,
    num_sink_tokens: int = 4,
) -> Policy:
    """The attention of the last queries, pooled over neighbours, best first.

    Defaults are those of the authors' LongBench runs (window 32, max pooling of 7).
    Deviations: scores are summed in float32 (theirs in the model's type), heads of a
    query group are averaged before pooling (theirs repeats K and V), and a few sinks
    are forced (theirs forces none).
    """
    return Policy(
        name="snapkv",
        score="window_sum",
        observation_window=observation_window,
        head_reduction="mean",
        pooling=pooling,
        pool_size=pool_size,
        num_sink_tokens=num_sink_tokens,
    )
