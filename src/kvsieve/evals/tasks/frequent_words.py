"""Frequent words: the three most frequent words of a coded text.

RULER's task of the same name (arXiv:2404.06654, section 3): made-up words whose frequencies
follow a zeta distribution, the word of rank k having a share of k ** -2 / zeta(2). The most
frequent one is noise, written "...", and the three after it are asked for.
"""

from __future__ import annotations

import math
import random
import string

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.task import CountTokens, Task

WORD_LETTERS = 6
VOCABULARY = 2000
NUM_ASKED = 3
NOISE = "..."
ZETA_OF_2 = math.pi**2 / 6
MIN_WORDS = 53
"""Enough for the word of rank 4 to be more frequent than that of rank 5."""


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    builds = [_build(length, index, seed) for index in range(count)]
    return fit(FREQUENT_WORDS.name, builds, count_tokens, length)


def word_counts(words: int) -> list[int]:
    """How often the word of each rank stands in a text of about so many words, the noise first.

    A rank that would not come once is left out, so the text is a little shorter.
    """
    counts = [int(words / (rank**2 * ZETA_OF_2)) for rank in range(1, VOCABULARY + 1)]
    return [number for number in counts if number > 0]


def _build(length: int, index: int, seed: int) -> Build:
    source = f"frequent_words/{length}/{seed}/{index}"
    rng = random.Random(source)
    vocabulary: dict[str, None] = {NOISE: None}
    while len(vocabulary) < VOCABULARY:
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=WORD_LETTERS))] = None
    ranked = list(vocabulary)
    asked = tuple(ranked[1 : 1 + NUM_ASKED])

    def build(units: int) -> Example:
        counts = word_counts(MIN_WORDS + units)
        words = [word for word, number in zip(ranked, counts, strict=False) for _ in range(number)]
        random.Random(f"{source}/order").shuffle(words)
        return Example(
            example_id=f"frequent_words/{length}/{index}",
            task="frequent_words",
            context=f"Count how often each coded word occurs in this text:\n\n{' '.join(words)}",
            question=(f"Which {NUM_ASKED} coded words occur most often? The dots are not a word."),
            references=asked,
            scorer="contains_all",
            max_tokens=32,
            answer_prefix=f"The {NUM_ASKED} most frequent coded words are:",
            tags={"length": length},
        )

    return build


FREQUENT_WORDS = Task("frequent_words", "the three most frequent words of a coded text", generate)
