"""Variable tracking: follow assignments from one variable to the next.

RULER's task of the same name (arXiv:2404.06654, section 3): one chain of five variables, of
which the first gets a number and each other one the value of the one before, hidden in order.
"""

from __future__ import annotations

import itertools
import random
import string

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import hide, repeated_filler
from kvsieve.evals.tasks.task import CountTokens, Task

NUM_HOPS = 4
NAME_LETTERS = 5


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    builds = [_build(length, index, seed) for index in range(count)]
    return fit(VARIABLE_TRACKING.name, builds, count_tokens, length)


def _build(length: int, index: int, seed: int) -> Build:
    rng = random.Random(f"variable_tracking/{length}/{seed}/{index}")
    names = _draw_names(rng, NUM_HOPS + 1)
    value = str(rng.randrange(10_000, 100_000))
    sentences = [f"VAR {names[0]} = {value}."]
    sentences += [f"VAR {name} = VAR {before}." for before, name in itertools.pairwise(names)]
    depths = sorted(rng.random() for _ in sentences)
    needles = list(zip(depths, sentences, strict=True))

    def build(units: int) -> Example:
        text = hide(needles, repeated_filler(units))
        return Example(
            example_id=f"variable_tracking/{length}/{index}",
            task="variable_tracking",
            context=f"Keep track of the variables that are assigned in the text below.\n\n{text}",
            question=f"Which variables have the value {value}, directly or by way of another one?",
            references=tuple(names),
            scorer="contains_all",
            max_tokens=48,
            answer_prefix=f"The {len(names)} variables with the value {value} are",
            tags={"length": length},
        )

    return build


def _draw_names(rng: random.Random, count: int) -> list[str]:
    """Different names of capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=NAME_LETTERS))] = None
    return list(names)


VARIABLE_TRACKING = Task(
    "variable_tracking", "the five variables of a chain of assignments", generate
)
