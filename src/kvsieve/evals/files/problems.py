"""Everything that is wrong with the files a user gave, told at once."""

from __future__ import annotations

from pathlib import Path

from kvsieve.core.errors import ConfigError

SHOWN = 10
"""A file in another format is wrong in every line: so many are told, the rest counted."""


class Problems:
    """Collects reasons while files are read, so that one run tells all of them."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._count = 0

    def add(self, path: Path, reason: str, line: int | None = None) -> None:
        """Note what is wrong with a file, or with one of its lines, counted from 1."""
        self._count += 1
        if len(self._shown) < SHOWN:
            where = f"{path}" if line is None else f"{path}, line {line}"
            self._shown.append(f"{where}: {reason}")

    def raise_if_any(self) -> None:
        """Stop if something was wrong.

        Raises:
            ConfigError: With the first `SHOWN` reasons and the number of the others.
        """
        if self._count > SHOWN:
            others = self._count - SHOWN
            raise ConfigError([*self._shown, f"and {others} more, in these files, not shown"])
        if self._shown:
            raise ConfigError(self._shown)
