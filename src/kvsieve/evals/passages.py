"""Tasks that judge the distribution over real text, token by token.

They work with the smallest model, because nothing has to be understood: a continuation of
some 64 tokens gives 64 comparisons per prompt, where a question gives one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvsieve.core.errors import ConfigError
from kvsieve.evals.item import Item

DOCUMENT = Path(__file__).parents[1] / "demo" / "document.txt"

CONTINUATION = 64
"""Tokens of a continuation that are judged."""

PASSAGE = 256
"""Tokens of a passage that comes twice."""

CUE = 16
"""Tokens of its second copy that the prompt ends with; the rest is judged."""


@dataclass(frozen=True)
class PassageTask:
    """A task over real text.

    Attributes:
        name: As `--tasks` takes it.
        title: What it asks of the cache, in a few words, for reports.
        judges: "agreement": whether the most probable token is the one of full KV. "text":
            whether it is the one that the text goes on with.
    """

    name: str
    title: str
    judges: Literal["agreement", "text"]


FIDELITY = PassageTask("fidelity", "the continuation of real text, against full KV", "agreement")
RECALL = PassageTask("recall", "a passage word for word, far back in the prompt", "text")

PASSAGE_TASKS = {task.name: task for task in (FIDELITY, RECALL)}


def read_text(path: Path | None) -> str:
    """The text to take passages from: the user's, or the report that comes with kvsieve.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return (path or DOCUMENT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read {path}: {error}"]) from None


def passage_items(
    task: PassageTask, text_ids: Sequence[int], *, length: int, count: int, seed: int
) -> list[Item]:
    """Prompts of exactly `length` tokens with the continuation that is forced.

    Args:
        task: `FIDELITY` or `RECALL`.
        text_ids: The text in tokens.
        length: Length of a prompt.
        count: Number of prompts; continuations do not overlap.
        seed: Where in the text they lie.

    Raises:
        ConfigError: The text is too short for so many prompts of this length.
    """
    make = _continuation if task is FIDELITY else _repetition
    judged = CONTINUATION if task is FIDELITY else PASSAGE
    last = len(text_ids) - judged - (length if task is FIDELITY else 0)
    if length < judged + PASSAGE or last < 0 or count > 1 + last // judged:
        least = length + count * CONTINUATION if task is FIDELITY else count * PASSAGE
        raise ConfigError(
            [
                f"{count} prompts of {length} tokens for task {task.name} need prompts of at least"
                f" {judged + PASSAGE} tokens and a text of at least {max(least, length)}, and the"
                f" text has {len(text_ids)}: give a longer one (--text), fewer prompts (--count)"
                " or other lengths (--lengths)"
            ]
        )
    # Evenly spread with a seeded shift: as far from one another as the text allows.
    step = last / count if count > 1 else 0.0
    shift = random.Random(f"{task.name}/{length}/{seed}").random() * (last - step * (count - 1))
    items = []
    for index in range(count):
        prompt, forced = make(text_ids, int(shift + step * index), length)
        items.append(
            Item(
                item_id=f"{task.name}/{length}/{seed}/{index}",
                task=task.name,
                prompt_ids=tuple(prompt),
                forced_ids=tuple(forced),
                tags={"length": length},
            )
        )
    return items


def _continuation(text: Sequence[int], at: int, length: int) -> tuple[Sequence[int], Sequence[int]]:
    return text[at : at + length], text[at + length : at + length + CONTINUATION]


def _repetition(text: Sequence[int], at: int, length: int) -> tuple[Sequence[int], Sequence[int]]:
    """A passage, other text, and the passage's first words again; then the rest of it."""
    passage = list(text[at : at + PASSAGE])
    # The gap is the text that follows, going on at its start where it ends.
    rest = [*text[at + PASSAGE :], *text[:at]]
    size = length - PASSAGE - CUE
    gap = (rest * (1 + size // len(rest)))[:size]
    return [*passage, *gap, *passage[:CUE]], passage[CUE:]
