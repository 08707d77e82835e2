"""The table of policies: from the configuration's name to the policy."""

from __future__ import annotations

from collections.abc import Callable

from kvsieve.core.config import SieveConfig
from kvsieve.policies.policy import Policy
from kvsieve.policies.snapkv import snapkv
from kvsieve.policies.streaming_llm import random_baseline, streaming_llm

POLICIES: dict[str, Callable[[SieveConfig], Policy]] = {
    "snapkv": lambda config: snapkv(
        observation_window=config.observation_window,
        pooling=config.pooling,
        pool_size=config.pool_size,
        num_sink_tokens=config.num_sink_tokens,
    ),
    "streaming_llm": lambda config: streaming_llm(
        config.observation_window, config.num_sink_tokens
    ),
    "random": lambda config: random_baseline(config.observation_window, config.num_sink_tokens),
}


def policy_from_config(config: SieveConfig) -> Policy:
    """The policy that the configuration names, with the configuration's parameters."""
    return POLICIES[config.policy](config)
