"""A prompt template with fields in braces, cut where the long part ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

BETWEEN = "\n\n"
"""What stands between an example's context and its question without a chat template."""


@dataclass(frozen=True)
class Template:
    """A template such as LongBench's `dataset2prompt.json` holds.

    Attributes:
        pieces: Text and the field after it, or None at the end, in turn.
    """

    pieces: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template.

        Raises:
            ValueError: It is no template, or does not name the context once. The message is a
                reason that follows a file's name.
        """
        pieces: list[tuple[str, str | None]] = []
        for before, field, form, conversion in Formatter().parse(text):
            if field is not None and (form or conversion or not field.isidentifier()):
                raise ValueError(f"{{{field}}} is more than the plain name of a field")
            pieces.append((before, field))
        if [field for _, field in pieces].count("context") != 1:
            raise ValueError("{context} must stand in it once")
        return cls(tuple(pieces))

    @property
    def fields(self) -> frozenset[str]:
        """The fields that it names."""
        return frozenset(field for _, field in self.pieces if field is not None)

    def fill(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt's context and question, which `BETWEEN` joins to the template's own text.

        Where the template has something else behind the context, the prompt is not cut: the
        question is then empty and the context is all of it.
        """
        parts = {True: "", False: ""}
        is_before = True
        for text, field in self.pieces:
            parts[is_before] += text + ("" if field is None else str(fields[field]))
            is_before = is_before and field != "context"
        before, after = parts[True], parts[False]
        if after.startswith(BETWEEN) and after != BETWEEN:
            return before, after.removeprefix(BETWEEN)
        return before + after, ""
