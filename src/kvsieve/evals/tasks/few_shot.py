"""Many-shot classification: labels whose meaning only the examples tell.

Each example in the prompt names a thing and gives it an invented label, which stands for a kind
of things. What is asked occurs in no example, so the kind has to be recognised; the kinds are so
different that small models can tell them apart.
"""

from __future__ import annotations

import random

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.task import CountTokens, Task

_ANIMALS = """
dog cat horse cow sheep goat pig rabbit mouse lion tiger bear wolf fox deer monkey elephant giraffe
zebra camel kangaroo squirrel donkey hamster
"""

_NUMBERS = """
1172 1394 1867 2045 2310 2783 3159 3428 3906 4017 4452 4891 5236 5570 5984 6103 6629 7048 7315 7762
8291 8640 9157 9533
"""

_CLOTHES = """
shirt trousers jacket coat hat scarf glove sock shoe boot sweater skirt dress belt tie vest blouse
jeans shorts sandal slipper cap hoodie mitten
"""

_COUNTRIES = """
France Germany Spain Italy Portugal Sweden Norway Denmark Poland Greece Turkey Egypt Kenya India
China Japan Brazil Chile Peru Mexico Canada Austria Hungary Ireland
"""

KINDS = tuple(tuple(words.split()) for words in (_ANIMALS, _NUMBERS, _CLOTHES, _COUNTRIES))

LABELS = ("blick", "dax", "fep", "gorp", "modi", "nurb", "toma", "wug", "zib")
"""Words that mean nothing."""


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    builds = [_build(length, index, seed) for index in range(count)]
    return fit(FEW_SHOT.name, builds, count_tokens, length)


def _build(length: int, index: int, seed: int) -> Build:
    source = f"few_shot/{length}/{seed}/{index}"
    rng = random.Random(source)
    labels = rng.sample(LABELS, len(KINDS))
    # Kinds are asked in turn: answering one label always is right in 1 of 4.
    asked_kind = index % len(KINDS)
    asked = rng.choice(KINDS[asked_kind])

    def build(units: int) -> Example:
        order = random.Random(f"{source}/order")
        lines: list[str] = []
        while len(lines) < units:
            kinds = list(range(len(KINDS)))
            order.shuffle(kinds)
            for kind in kinds:
                thing = order.choice([word for word in KINDS[kind] if word != asked])
                lines.append(f"{thing}: {labels[kind]}")
        listed = "\n".join(lines[:units])
        return Example(
            example_id=f"few_shot/{length}/{index}",
            task="few_shot",
            context=f"Each thing has a label that tells its kind.\n\n{listed}",
            question=f"{asked}:",
            references=(labels[asked_kind],),
            scorer="prefix_choice",
            max_tokens=8,
            stop=("\n",),
            choices=tuple(labels),
            tags={"length": length},
        )

    return build


FEW_SHOT = Task(
    "few_shot", "classify by labels that only the examples explain", generate, 1 / len(KINDS)
)
