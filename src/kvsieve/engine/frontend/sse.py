"""One server-sent event as text: reading its JSON, and adding a field to it."""

from __future__ import annotations

import json
import re
from typing import Any

# One line of data that holds an object; vLLM's JSON has no line breaks. Anthropic's events
# have a name besides.
_EVENT = re.compile(r"((?:event:[^\n]*\n)?data: ?)(\{[^\n]*\})(\s*)")


def event_data(event: str) -> dict[str, Any] | None:
    """The JSON object that the event carries; None for a comment or `[DONE]`."""
    match = _EVENT.fullmatch(event)
    if match is None:
        return None
    data: dict[str, Any] = json.loads(match[2])
    return data


def with_field(event: str, name: str, value: Any) -> str:
    """The event with one more field at the end of its object, every other byte as it was.

    Returns:
        The event itself if it carries no object, or has the field already.

    Raises:
        ValueError: The value is not JSON, such as a number that is none.
    """
    data = event_data(event)
    if data is None or name in data:
        return event
    match = _EVENT.fullmatch(event)
    assert match is not None
    head, body, tail = match.groups()
    field = json.dumps({name: value}, separators=(",", ":"), allow_nan=False)[1:-1]
    return f"{head}{body[:-1]}{',' if data else ''}{field}}}{tail}"
