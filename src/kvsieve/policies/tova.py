"""TOVA, token omission via attention (Oren et al. 2024, arXiv 2401.06104), for prompts."""

from __future__ import annotations

from kvsieve.core.config import SieveConfig
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.reduce import mean_of_all
from kvsieve.policies.snapkv import window_attention


def build(config: SieveConfig) -> Policy:
    """The attention of the last query, mean over all heads: all KV heads keep the same tokens.

    Deviations: the choice is made once, when the prompt was read (theirs drops the lowest token
    in every step). The last token is always kept. With tensor parallelism each worker takes the
    mean over its own heads.
    """
    return Policy.with_settings(config, window_attention, reduce=mean_of_all)


TOVA = Method(
    name="tova",
    summary="Attention of the last query, the same tokens for all heads",
    source="arXiv 2401.06104",
    sees_question=True,
    build=build,
    defaults={"observation_window": 1, "num_sink_tokens": 0, "pool_size": 1},
)
