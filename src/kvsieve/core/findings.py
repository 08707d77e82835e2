"""What pydantic finds wrong with settings, as sentences that say what to do."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError


def reasons_of(
    error: ValidationError, settings: Mapping[str, Any], known: Sequence[str]
) -> list[str]:
    """A sentence for each setting that is wrong.

    Args:
        error: What pydantic found.
        settings: What was given.
        known: Names of all settings.
    """
    by_field: dict[str, list[str]] = {}
    for finding in error.errors():
        name = str(finding["loc"][0]) if finding["loc"] else ""
        if finding["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
            by_field.setdefault(name, []).append(f"unknown setting {name!r}; {hint}")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            by_field.setdefault(name, []).append(message)
    reasons = []
    for name, messages in by_field.items():
        if name in known:
            # A union reports once for each branch; one sentence is enough.
            what = " or ".join(dict.fromkeys(messages))
            given = "nothing"
            if name in settings:
                given = textwrap.shorten(repr(settings[name]), 80, placeholder="...")
            reasons.append(f"{name}: {textwrap.shorten(what, 600)} (given: {given})")
        else:
            reasons.extend(messages)
    return reasons
