"""One line's JSON object, read field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tags = dict[str, int | float | str]


class Record:
    """The fields of a line, and what is wrong with them.

    A field that is missing or of another type is noted in `wrong` and read as an empty value, so
    that one look at a line finds everything.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.wrong: list[str] = []

    def text(self, name: str, *, may_be_empty: bool = False, optional: bool = False) -> str:
        """A text. An optional one may be missing or null, and is then empty."""
        value = self.fields.get(name)
        if value is None and optional:
            return ""
        if value is None:
            self.wrong.append(f"`{name}` is missing")
        elif not isinstance(value, str):
            self.wrong.append(f"`{name}` is {kind(value)}, not a text")
        elif not value.strip() and not may_be_empty:
            self.wrong.append(f"`{name}` is empty")
        else:
            return value
        return ""

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        """A list of texts or numbers, or one of them alone; lists inside it are joined."""
        value = self.fields.get(name)
        if value is None:
            if not optional:
                self.wrong.append(f"`{name}` is missing")
            return ()
        found: list[str] = []
        left = [value]
        while left:
            item = left.pop()
            if isinstance(item, list):
                left.extend(reversed(item))
            elif isinstance(item, str | int | float) and not isinstance(item, bool):
                found.append(str(item))
            else:
                self.wrong.append(f"`{name}` holds {kind(item)}, where texts belong")
                return ()
        if not any(text.strip() for text in found) and not optional:
            self.wrong.append(f"`{name}` is empty")
        return tuple(found)

    def tags(self, **names: str) -> Tags:
        """Those of the fields that are a text or a number: `tags(words="length")`."""
        found = {tag: self.fields.get(name) for tag, name in names.items()}
        return {
            tag: value
            for tag, value in found.items()
            if isinstance(value, str | int | float) and not isinstance(value, bool)
        }


def kind(value: Any) -> str:
    """What JSON calls a value, for messages."""
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a text"}
    return "null" if value is None else names.get(type(value), "a number")
