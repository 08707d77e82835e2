"""Haystacks, and needles put into them."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

FILLER = (
    "The kettle stands on the stove.",
    "A path runs along the river.",
    "The clouds drift over the hills.",
    "Bread is sold at the corner.",
    "The clock ticks in the hall.",
)
"""Neutral sentences. Repeated, they are the easiest haystack: whatever is not one stands out."""

DEPTH_LEVELS = 11
"""Most different depths of a run: 0%, 10%, ... 100%."""


def repeated_filler(sentences: int) -> list[str]:
    """The filler sentences in turn, over and over."""
    return list(itertools.islice(itertools.cycle(FILLER), sentences))


def prose(words: int, seed: str) -> list[str]:
    """Sentences of the document that the package ships, its paragraphs in a random order.

    When the document is too short it comes again, in another order.

    Args:
        words: Words in all; the last sentence is cut to have so many, and closed by a full stop.
        seed: What the order follows.
    """
    rng = random.Random(seed)
    taken: list[str] = []
    left = words
    while True:
        paragraphs = list(document_paragraphs())
        rng.shuffle(paragraphs)
        for sentence in itertools.chain.from_iterable(paragraphs):
            parts = sentence.split()
            if left <= 0:
                return taken
            if len(parts) > left:
                taken.append(" ".join(parts[:left]).rstrip(".,:;") + ".")
                return taken
            taken.append(sentence)
            left -= len(parts)


@cache
def document_paragraphs() -> tuple[tuple[str, ...], ...]:
    """The sentences of each paragraph; `kvsieve.demo.document` says where the text is from."""
    # Read as data: rooms on one level do not import one another.
    file = files("kvsieve").joinpath("demo").joinpath("document.txt")
    paragraphs = file.read_text(encoding="utf-8").strip().split("\n\n")
    return tuple(
        tuple(re.split(r"(?<=[.?!]) +(?=[A-Z])", paragraph.removeprefix("* ")))
        for paragraph in paragraphs
    )


def spread_depths(count: int) -> list[float]:
    """A depth for each of so many examples, evenly over 0 to 1 (start to end of the haystack)."""
    levels = min(count, DEPTH_LEVELS)
    if levels == 1:
        return [0.5] * count
    return [round(index % levels / (levels - 1), 2) for index in range(count)]


def hide(needles: Sequence[tuple[float, str]], hay: Sequence[str]) -> str:
    """One text of the sentences, with each needle between two of them at its depth.

    Args:
        needles: Depth in [0, 1], as the share of the haystack's characters before it, and
            sentence. Needles at the same place keep the order of their depths.
        hay: Sentences.
    """
    # Where each sentence begins, and where the last one ends.
    starts = list(itertools.accumulate(map(len, hay), initial=0))
    text: list[str] = []
    place = 0
    for depth, needle in sorted(needles, key=lambda needle: needle[0]):
        gap = _nearest(starts, depth * starts[-1])
        text += [*hay[place:gap], needle]
        place = gap
    return " ".join([*text, *hay[place:]])


def _nearest(ascending: Sequence[int], wanted: float) -> int:
    """Index of the number that is nearest; the lower one of two."""
    above = bisect.bisect_left(ascending, wanted)
    if above == 0 or (
        above < len(ascending) and ascending[above] - wanted < wanted - ascending[above - 1]
    ):
        return above
    return above - 1
