"""Options: a method's own parameters, read from a configuration and checked."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from kvsieve.core.config import SieveConfig


def read_number(
    config: SieveConfig,
    options: Mapping[str, Any],
    name: str,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
) -> float:
    """An option that is a finite number.

    Args:
        config: The configuration.
        options: The method's options with their default values.
        name: The option.
        at_least: Lower bound, itself allowed.
        at_most: Upper bound, itself allowed.
        above: Lower bound, itself not allowed.

    Raises:
        ValueError: It is none, or out of bounds.
    """
    value = config.policy_options.get(name, options[name])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be a number, got {reprlib.repr(value)}")
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", at_least), ("above", above), ("at most", at_most))
        if math.isfinite(bound)
    ]
    if not (at_least <= value <= at_most and value > above):
        raise ValueError(f"{name} must be {' and '.join(bounds)}, got {reprlib.repr(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large: {reprlib.repr(value)}") from None


def read_count(
    config: SieveConfig,
    options: Mapping[str, Any],
    name: str,
    *,
    at_least: int = 0,
    at_most: int = 2**31 - 1,
) -> int:
    """An option that is a whole number in [at_least, at_most].

    Raises:
        ValueError: It is none, or out of bounds.
    """
    value = config.policy_options.get(name, options[name])
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {reprlib.repr(value)}")
    if not at_least <= value <= at_most:
        raise ValueError(f"{name} must be in [{at_least}, {at_most}], got {reprlib.repr(value)}")
    return value


def read_switch(config: SieveConfig, options: Mapping[str, Any], name: str) -> bool:
    """An option that is true or false.

    Raises:
        ValueError: It is neither.
    """
    value = config.policy_options.get(name, options[name])
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {reprlib.repr(value)}")
    return value
