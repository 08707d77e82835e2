"""Second question: one that comes after the cache has been sieved.

The prompt ends with a first question, which is what the sieve goes by. The model is then made to
say the right answer and a second question, about another fact. What the second question needs
may be gone: this is where a sieve that looks at the question loses most.
"""

from __future__ import annotations

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.facts import draw_facts
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import spread_depths
from kvsieve.evals.tasks.task import CountTokens, Task


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`; `length` is that of the prompt up to the sieve."""
    depths = spread_depths(count)
    builds = [_build(length, depth, index, seed) for index, depth in enumerate(depths)]
    return fit(SECOND_QUESTION.name, builds, count_tokens, length)


def _build(length: int, depth: float, index: int, seed: int) -> Build:
    facts = draw_facts(f"second_question/{length}/{seed}/{index}", depth)

    def build(units: int) -> Example:
        return Example(
            example_id=f"second_question/{length}/{depth:.2f}/{index}",
            task="second_question",
            context=facts.context(units),
            question=facts.question(0),
            references=(facts.values[1],),
            scorer="contains_all",
            max_tokens=16,
            answer_prefix=facts.answer_prefix(0),
            after_sieve=f" {facts.values[0]}.\n\n{facts.question(1)}\n{facts.answer_prefix(1)}",
            tags={"length": length, "depth": depth},
        )

    return build


SECOND_QUESTION = Task("second_question", "a second question, after the eviction", generate)
