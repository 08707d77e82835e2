"""Instruction: does the system message survive a long document?

The system message says how every answer ends. A document and a question about it follow, and the
model is made to say an answer and to begin the closing line, once the prompt has been sieved: the
question is no hint that the system message will matter. What counts is the end of that line.
"""

from __future__ import annotations

import random

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import prose
from kvsieve.evals.tasks.task import CountTokens, Task
from kvsieve.evals.tasks.words import NOUNS


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    builds = [_build(length, index, seed) for index in range(count)]
    return fit(INSTRUCTION.name, builds, count_tokens, length)


def _build(length: int, index: int, seed: int) -> Build:
    source = f"instruction/{length}/{seed}/{index}"
    rng = random.Random(source)
    word = rng.choice(NOUNS)

    def build(units: int) -> Example:
        text = " ".join(prose(units, f"{source}/hay"))
        return Example(
            example_id=f"instruction/{length}/{index}",
            task="instruction",
            system=f'End every answer with the closing line "Code word: {word}".',
            context=text,
            question="What is the text about?",
            references=(word,),
            scorer="contains_all",
            max_tokens=8,
            answer_prefix="The text is about",
            after_sieve=" libraries that turn microfilm into digital images.\nCode word:",
            tags={"length": length},
        )

    return build


INSTRUCTION = Task("instruction", "follow the system message after a long document", generate)
