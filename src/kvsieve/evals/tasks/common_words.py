"""Common words: the ten words that a long list repeats most.

RULER's task of the same name (arXiv:2404.06654, section 3): common words stand 30 times in the
list, the others 3 times. Both counts shrink with a prompt that is too short for that, and grow
with one that would need more different words than there are; common words are always ten times
as frequent.
"""

from __future__ import annotations

import random

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit, prompt_text
from kvsieve.evals.tasks.task import CountTokens, Task
from kvsieve.evals.tasks.words import NOUNS

NUM_COMMON = 10
TIMES_AS_FREQUENT = 10
REPEATS = 3
"""How often an uncommon word stands in the list, where the length allows it."""


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    repeats = _repeats(count_tokens, length, seed)
    builds = [_build(length, index, seed, repeats) for index in range(count)]
    return fit(COMMON_WORDS.name, builds, count_tokens, length)


def _repeats(count_tokens: CountTokens, length: int, seed: int) -> int:
    """How often an uncommon word stands in the list.

    At least ten different uncommon words have to fit, and no more than there are.
    """
    build = _build(length, 0, seed, 1)
    bare, more = (count_tokens(prompt_text(build(units))) for units in (0, NUM_COMMON))
    per_item = max((more - bare) / NUM_COMMON, 0.1)
    items = length / per_item
    affordable = int(items / (NUM_COMMON * TIMES_AS_FREQUENT + NUM_COMMON))
    needed = int(items / (len(NOUNS) - NUM_COMMON)) + 1
    return max(min(REPEATS, affordable), needed, 1)


def _build(length: int, index: int, seed: int, repeats: int) -> Build:
    source = f"common_words/{length}/{seed}/{index}"
    words = random.Random(source).sample(NOUNS, len(NOUNS))
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]

    def build(units: int) -> Example:
        # A unit is one item of the list: whole words would be too coarse for short prompts.
        rest = [others[item // repeats % len(others)] for item in range(units)]
        items = common * (repeats * TIMES_AS_FREQUENT) + rest
        random.Random(f"{source}/order").shuffle(items)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(items, 1))
        return Example(
            example_id=f"common_words/{length}/{index}",
            task="common_words",
            context=f"Some words are repeated more often than others in this list:\n\n{listed}",
            question=f"Which {NUM_COMMON} words does the list repeat most?",
            references=tuple(common),
            scorer="contains_all",
            max_tokens=64,
            answer_prefix=f"The {NUM_COMMON} most frequent words are:",
            tags={"length": length},
        )

    return build


COMMON_WORDS = Task("common_words", "the ten most frequent words of a list", generate)
