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
    task: PassageTask,
    text_ids: Sequence[int],
    *,
    length: int,
    count: int,
    seed: int,
    beginning: Sequence[int] = (),
) -> list[Item]:
    """Prompts of exactly `length` tokens with the continuation that is forced.

    Args:
        task: `FIDELITY` or `RECALL`.
        text_ids: The text in tokens.
        length: Length of a prompt.
        count: Number of prompts; continuations do not overlap.
        seed: Where in the text they lie.
        beginning: Tokens that every prompt begins with, such as BOS; part of its length.

    Raises:
        ConfigError: The text is too short for so many prompts of this length.
    """
    make = _continuation if task is FIDELITY else _repetition
    judged = CONTINUATION if task is FIDELITY else PASSAGE
    shortest = judged + PASSAGE + len(beginning)
    room = length - len(beginning)
    # A gap that is longer than the text would repeat it.
    needed = room + count * CONTINUATION if task is FIDELITY else max(count * PASSAGE, room)
    reasons = []
    if length < shortest:
        reasons.append(
            f"task {task.name} needs prompts of at least {shortest} tokens (--lengths), given:"
            f" {length}"
        )
    if len(text_ids) < needed:
        reasons.append(
            f"{count} prompts of {length} tokens for task {task.name} need a text of {needed}"
            f" tokens, and it has {len(text_ids)}: give a longer one (--text), fewer prompts"
            " (--count) or shorter ones (--lengths)"
        )
    if reasons:
        raise ConfigError(reasons)
    last = len(text_ids) - judged - (room if task is FIDELITY else 0)
    # Evenly spread with a seeded shift: as far from one another as the text allows, and at
    # least so far that no two overlap.
    step = max(last / count, judged) if count > 1 else 0.0
    shift = random.Random(f"{task.name}/{length}/{seed}").random() * (last - step * (count - 1))
    items = []
    for index in range(count):
        prompt, forced = make(text_ids, int(shift + step * index), room)
        items.append(
            Item(
                item_id=f"{task.name}/{length}/{seed}/{index}",
                task=task.name,
                prompt_ids=(*beginning, *prompt),
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
