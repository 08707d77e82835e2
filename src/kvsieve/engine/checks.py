"""The check at start: what cannot be served is refused by name, with every reason at once."""

from __future__ import annotations

from vllm.config import VllmConfig

from kvsieve.core.errors import ConfigError
from kvsieve.engine.compat import missing_symbols, version_refusal
from kvsieve.engine.support import FEATURES


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Stop the start if the configuration asks for what kvsieve does not serve.

    Raises:
        ConfigError: Every feature refused, each with what to change.
    """
    reasons = []
    if version := version_refusal():
        reasons.append(version)
    if missing := missing_symbols():
        reasons.append(
            "this vLLM lacks symbols that kvsieve relies on: "
            + ", ".join(symbol.name for symbol in missing)
            + "; run `kvsieve doctor`"
        )
    reasons.extend(
        f"{feature.name} is not served together with kvsieve: {feature.note}"
        for feature in FEATURES
        if feature.is_asked_for is not None and feature.is_asked_for(vllm_config)
    )
    if reasons:
        raise ConfigError(reasons)
