"""The table of policies: from the configuration's name to the policy."""

from __future__ import annotations

from collections.abc import Callable

from kvsieve.core.config import SieveConfig
from kvsieve.policies.policy import Policy
from kvsieve.policies.snapkv import snapkv

POLICIES: dict[str, Callable[[SieveConfig], Policy]] = {
    "snapkv": lambda config: snapkv(
        observation_window=config.observation_window,
        pooling=config.pooling,
        pool_size=config.pool_size,
        num_sink_tokens=config.num_sink_tokens,
    ),
}


def policy_from_config(config: SieveConfig) -> Policy:
    """The policy that the configuration names, with the configuration's parameters."""
    return POLICIES[config.policy](config)
