"""Our settings in vLLM's configuration, and the policy that they name: read once per process.

Requests ask for them, and reading them may look for packages of third parties or open a policy's
own files.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from kvsieve.core.config import CONFIG_KEY, SieveConfig
from kvsieve.policies import Policy, parse_settings, policy_from_config
from kvsieve.pruning import ModelPruning, pruning_from_config


def sieve_config(vllm_config: Any) -> SieveConfig:
    """The settings in a vLLM configuration that has some (`activation.is_configured`).

    Raises:
        ConfigError: Every problem found, in words.
    """
    return _read(_as_text(vllm_config))[0]


def sieve_policy(vllm_config: Any) -> Policy:
    """The policy that those settings name.

    Raises:
        ConfigError: As `sieve_config`.
    """
    return _read(_as_text(vllm_config))[1]


def model_pruning(vllm_config: Any) -> ModelPruning | None:
    """How prompts are pruned by those settings; None if none is.

    Raises:
        ConfigError: As `sieve_config`.
    """
    return _read(_as_text(vllm_config))[2]


def _as_text(vllm_config: Any) -> str:
    # vLLM hashes `additional_config` in the same way, so it is JSON.
    return json.dumps(vllm_config.additional_config[CONFIG_KEY], sort_keys=True)


@lru_cache(maxsize=8)
def _read(settings: str) -> tuple[SieveConfig, Policy, ModelPruning | None]:
    config = parse_settings(json.loads(settings))
    return config, policy_from_config(config), pruning_from_config(config)
