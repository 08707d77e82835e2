"""Facts: several needles in one text, two of which are asked for, one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.evals.tasks.haystack import hide, prose
from kvsieve.evals.tasks.words import draw_numbers

THINGS = (
    ("door code", "bakery"),
    ("phone number", "dentist"),
    ("ticket number", "theater"),
    ("account number", "gardener"),
    ("locker number", "swimmer"),
    ("license number", "taxi driver"),
    ("room number", "pianist"),
    ("order number", "florist"),
)
"""A kind of number and who has it: no fact can be taken for another."""

NUM_FACTS = 4


@dataclass(frozen=True)
class Facts:
    """A text with facts in it.

    Attributes:
        source: Seed of the text around them.
        depths: Depth of each fact in the text, in [0, 1].
        things: What each number is, such as "door code of the bakery". The first is asked for
            first, the second after it.
        values: The numbers.
    """

    source: str
    depths: tuple[float, ...]
    things: tuple[str, ...]
    values: tuple[str, ...]

    def context(self, units: int) -> str:
        """The text, with so many words around the facts."""
        needles = [(depth, self.answer(which)) for which, depth in enumerate(self.depths)]
        text = hide(needles, prose(units, f"{self.source}/hay"))
        return f"Read the text below and remember every number in it.\n\n{text}"

    def question(self, which: int) -> str:
        """The question about one fact."""
        return f"According to the text, what is the {self.things[which]}?"

    def answer_prefix(self, which: int) -> str:
        """How the answer to it begins."""
        return f"The {self.things[which]} is"

    def answer(self, which: int) -> str:
        """The right answer to it, in full; the text says the same."""
        return f"{self.answer_prefix(which)} {self.values[which]}."


def draw_facts(source: str, second_depth: float) -> Facts:
    """Facts by seed.

    Args:
        source: The seed.
        second_depth: Depth of the fact that is asked for second; the others are anywhere.
    """
    rng = random.Random(source)
    depths = [rng.random() for _ in range(NUM_FACTS)]
    depths[1] = second_depth
    things = [f"{number} of the {owner}" for number, owner in rng.sample(THINGS, NUM_FACTS)]
    return Facts(source, tuple(depths), tuple(things), tuple(draw_numbers(rng, NUM_FACTS)))
