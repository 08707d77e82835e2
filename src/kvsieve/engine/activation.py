"""Whether kvsieve is asked for: nothing of it works otherwise."""

from __future__ import annotations

import os
from typing import Any

from kvsieve.core.config import CONFIG_KEY


def is_disabled() -> bool:
    """Whether `KVSIEVE_DISABLE` switches kvsieve off."""
    return os.environ.get("KVSIEVE_DISABLE", "0") not in ("", "0")


def is_configured(additional_config: Any) -> bool:
    """Whether vLLM's `additional_config` asks for the sieve, and nothing switches it off."""
    return (
        isinstance(additional_config, dict)
        and CONFIG_KEY in additional_config
        and not is_disabled()
    )
