"""Needle in a haystack, in six kinds that RULER defines.

A needle gives a key a value; the question names a key and wants the value. The kinds differ in
what the haystack is, and in how many keys are hidden, have several values, or are asked (Hsieh et
al. 2024, arXiv:2404.06654, section 3 and appendix B).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import hide, prose, repeated_filler, spread_depths
from kvsieve.evals.tasks.task import CountTokens, Task
from kvsieve.evals.tasks.words import draw_keys, draw_numbers, draw_uuid

Hay = Literal["filler", "prose", "needles"]


@dataclass(frozen=True)
class Niah:
    """One kind.

    Attributes:
        name: Name of the task.
        title: For reports.
        hay: Repeated filler sentences, real prose, or nothing but further needles.
        keys: Keys hidden, the ones asked for included.
        values: Values of each key.
        asked: Keys asked for.
        uuids: Keys and values are UUIDs; else two words and a number of seven digits.
    """

    name: str
    title: str
    hay: Hay
    keys: int = 1
    values: int = 1
    asked: int = 1
    uuids: bool = False

    def generate(
        self, count_tokens: CountTokens, length: int, count: int, seed: int
    ) -> list[Example]:
        """See `kvsieve.evals.tasks.task.Generate`."""
        depths = spread_depths(count)
        builds = [self._build(length, depth, index, seed) for index, depth in enumerate(depths)]
        return fit(self.name, builds, count_tokens, length)

    def task(self) -> Task:
        """As it stands in the table of tasks."""
        return Task(self.name, self.title, self.generate)

    def _build(self, length: int, depth: float, index: int, seed: int) -> Build:
        """What makes example number `index`.

        A single needle is put at `depth`; where several must be found, they are spread at random.
        """
        source = f"{self.name}/{length}/{seed}/{index}"
        rng = random.Random(source)
        keys = self._draw_keys(rng)
        values = self._draw_values(rng)
        single = self.asked == self.values == 1
        needles = [
            (depth if single and key == keys[0] else rng.random(), self._needle(key, value))
            for key, row in zip(keys, values, strict=True)
            for value in row
        ]
        references = tuple(value for row in values[: self.asked] for value in row)
        where = f"{depth:.2f}/" if single else ""
        tags: dict[str, int | float | str] = {"length": length}
        if single:
            tags["depth"] = depth

        def build(units: int) -> Example:
            text = hide(needles, self._hay(units, source))
            return Example(
                example_id=f"{self.name}/{length}/{where}{index}",
                task=self.name,
                context=f"{self._instruction()}\n\n{text}",
                question=self._question(keys[: self.asked]),
                references=references,
                scorer="contains_all",
                max_tokens=(48 if self.uuids else 16) * len(references),
                answer_prefix=self._answer_prefix(keys[: self.asked]),
                tags=tags,
            )

        return build

    def _draw_keys(self, rng: random.Random) -> list[str]:
        if self.uuids:
            return [draw_uuid(rng) for _ in range(self.keys)]
        return draw_keys(rng, self.keys)

    def _draw_values(self, rng: random.Random) -> list[list[str]]:
        """The values of each key."""
        if self.uuids:
            return [[draw_uuid(rng) for _ in range(self.values)] for _ in range(self.keys)]
        flat = draw_numbers(rng, self.keys * self.values)
        return [flat[at : at + self.values] for at in range(0, len(flat), self.values)]

    def _hay(self, units: int, source: str) -> list[str]:
        match self.hay:
            case "filler":
                return repeated_filler(units)
            case "prose":
                return prose(units, f"{source}/hay")
            case "needles":
                rng = random.Random(f"{source}/hay")
                return [self._needle(draw_uuid(rng), draw_uuid(rng)) for _ in range(units)]

    @property
    def _noun(self) -> str:
        return "secret code" if self.uuids else "secret number"

    def _needle(self, key: str, value: str) -> str:
        return f"The {self._noun} of {self._named(key)} is {value}."

    def _named(self, key: str) -> str:
        return key if self.uuids else f"the {key}"

    def _instruction(self) -> str:
        return f"Read the text below and remember every {self._noun} in it."

    def _question(self, keys: list[str]) -> str:
        named = _listed([self._named(key) for key in keys])
        if self.values > 1:
            return f"The text gives {self.values} {self._noun}s of {named}. What are they?"
        if len(keys) > 1:
            return f"According to the text, what are the {self._noun}s of {named}?"
        return f"According to the text, what is the {self._noun} of {named}?"

    def _answer_prefix(self, keys: list[str]) -> str:
        named = _listed([self._named(key) for key in keys])
        if self.values == 1 and len(keys) == 1:
            return f"The {self._noun} of {named} is"
        return f"The {self._noun}s of {named} are"


def _listed(names: list[str]) -> str:
    """A list in words: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


NIAH_TASKS = tuple(
    kind.task()
    for kind in (
        Niah("niah", "one needle in repeated filler", "filler"),
        Niah("niah_essay", "one needle in real prose", "prose"),
        Niah("niah_multikey", "one of four needles in real prose", "prose", keys=4),
        Niah("niah_multivalue", "all four values of one key", "prose", values=4),
        Niah("niah_multiquery", "the values of four keys", "prose", keys=4, asked=4),
        Niah("niah_uuid", "one UUID needle among others like it", "needles", uuids=True),
    )
)
"""RULER's niah_single_1, niah_single_2, niah_multikey_1, niah_multivalue, niah_multiquery and
niah_multikey_3."""
