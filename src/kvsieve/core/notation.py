"""How settings are written: budgets, shares of a prompt, layers, budgets by layers."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LAYERS = 10_000
"""No model has more; a range beyond it is a slip of the finger."""

MAX_BUDGET = 10**9
"""No prompt has more tokens. Numbers beyond 64 bits could not even be sent between processes."""

LAYER_BUDGET_SHAPES = ("uniform", "pyramid")
"""The values of `layer_budgets` that are no budgets by layer range."""

ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}", re.ASCII)
"""A role of a chat."""

COUNT = re.compile(r"^\s*([0-9]{1,12})\s*$")
_PERCENT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$")
_RANGE = re.compile(r"^([0-9]{1,9})(?:-([0-9]{1,9}))?$")


def read_json(text: str) -> Any:
    """What a JSON text says, if it says it once.

    Raises:
        ValueError: It is no JSON (`json.JSONDecodeError`), is nested too deeply, or an object in
            it names a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            # JSON would take the last one, and the other would be gone without a word.
            raise ValueError(f"it names {reprlib.repr(name)} twice")
        named[name] = value
    return named


def parse_share(text: str) -> float:
    """A share such as `"10%"` as a number in (0, 1].

    Raises:
        ValueError: The text is no percentage, or outside (0%, 100%].
    """
    match = _PERCENT.match(text)
    if not match:
        raise ValueError(f"{text!r} is neither a number of tokens nor a share such as '10%'")
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise ValueError(f"a share must be above 0% and at most 100%, got {text!r}")
    return share


def parse_layer_ranges(text: str) -> tuple[int, ...]:
    """Layer numbers of a text such as `"0-2,15"`, ascending and unique.

    Raises:
        ValueError: A part of the text is neither a number nor an ascending range.
    """
    layers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = _RANGE.match(part)
        if not match:
            raise ValueError(
                f"{part!r} in {text!r} is neither a layer number nor a range like '0-2'"
            )
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        if last >= MAX_LAYERS:
            raise ValueError(f"{part!r} names a layer beyond {MAX_LAYERS}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def layer_list(layers: Sequence[int]) -> str:
    """Ascending layer numbers for a reader: `(0, 1, 2, 5)` as `0-2, 5`, no layer as `none`."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges) or "none"


def parse_budget(value: int | str) -> int | str:
    """A budget in tokens (int), or a share of the prompt such as `"10%"` as text.

    Raises:
        ValueError: It is neither, or out of range.
    """
    if isinstance(value, str):
        if not COUNT.match(value):
            parse_share(value)
            return value.replace(" ", "")
        value = int(value)
    if value <= 0:
        raise ValueError(f"a budget must be at least 1 token, got {value}")
    if value > MAX_BUDGET:
        raise ValueError(f"a budget must be at most {MAX_BUDGET} tokens")
    return value


def parse_layer_budgets(value: Any) -> str | dict[str, int | str]:
    """`"uniform"`, `"pyramid"`, or budgets by layer range with the ranges written in one way.

    Args:
        value: One of the two words, an object such as `{"3-9": 512, "10-29": "5%"}`, or such an
            object as JSON text.

    Raises:
        ValueError: Everything that is wrong with it, in words.
    """
    wanted = 'give "uniform", "pyramid" or budgets by layers such as {"3-9": 512, "10-29": "5%"}'
    if isinstance(value, str):
        word = value.strip().lower()
        if word in LAYER_BUDGET_SHAPES:
            return word
        try:
            value = read_json(value)
        except json.JSONDecodeError:
            raise ValueError(wanted) from None
        except ValueError as error:
            raise ValueError(f"{error}; {wanted}") from None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(wanted)
    budgets: dict[str, int | str] = {}
    reasons: list[str] = []
    times: dict[int, int] = {}
    for key, given in value.items():
        try:
            if isinstance(given, bool) or not isinstance(given, int | str):
                raise ValueError(f"{given!r} is neither a number of tokens nor a text")
            layers = parse_layer_ranges(str(key))
            budgets[layer_list(layers)] = parse_budget(given)
        except ValueError as error:
            reasons.append(f"at {key!r}, {error}")
            continue
        for layer in layers:
            times[layer] = times.get(layer, 0) + 1
    double = sorted(layer for layer, count in times.items() if count > 1)
    if double:
        reasons.append(f"in more than one range: {layer_list(double)}")
    if reasons:
        raise ValueError("; ".join(reasons))
    return budgets
