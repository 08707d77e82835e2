"""What a format of example files is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvsieve.evals.example import Example

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """How much is taken from a file.

    Attributes:
        answer_tokens: Most tokens of an answer, where the format would allow more.
        line_bytes: Longest line, in bytes. The longest published ones, InfiniteBench's books
            in Chinese, have some 8 MiB.
    """

    answer_tokens: int | None = None
    line_bytes: int = 64 * MIB

    def answer(self, published: int) -> int:
        """Length of an answer, in tokens, where the format's own is `published`."""
        return published if self.answer_tokens is None else min(published, self.answer_tokens)


DEFAULT_LIMITS = Limits()


class Load(Protocol):
    """Reads examples from a file, or from every file of the format in a folder."""

    def __call__(
        self,
        path: Path,
        *,
        count: int | None = None,
        seed: int = 0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> list[Example]:
        """Read examples.

        Args:
            path: The file or folder.
            count: Most examples of each file (of MMLU, of all subjects together), drawn by
                `seed`; None takes all. A smaller draw is a part of a larger one.
            seed: Of the draw.
            limits: How much is taken.

        Returns:
            Examples in the order of the files' names and lines. Ids are made of a file's place
            in the folder and a line's number, so they do not depend on the draw.

        Raises:
            ConfigError: With every reason, each with file and line.
        """


@dataclass(frozen=True)
class Format:
    """A published format of example files.

    Attributes:
        name: As `--data NAME:PATH` takes it.
        title: Whose format it is and what it asks, in a few words, for reports.
        load: Reads examples.
    """

    name: str
    title: str
    load: Load
