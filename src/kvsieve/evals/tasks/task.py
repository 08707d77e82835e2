"""What a generated task is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsieve.evals.example import Example

CountTokens = Callable[[str], int]
"""Length of a text in tokens, by the tokenizer of the model that is judged."""

Generate = Callable[[CountTokens, int, int, int], list[Example]]
"""`generate(count_tokens, length, count, seed)`: so many examples, whose prompts have at most
`length` tokens and come near it. The same arguments give the same examples on any machine."""


@dataclass(frozen=True)
class Task:
    """A task whose examples are made offline.

    Attributes:
        name: As `--tasks` takes it.
        title: What it asks of the cache, in a few words, for reports.
        generate: Makes examples.
        floor: Score that an answer gets without having read the context, in [0, 1].
    """

    name: str
    title: str
    generate: Generate
    floor: float = 0.0
