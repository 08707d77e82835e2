"""Multi-turn: a second question in a later turn, the whole conversation sent again.

That is what chat clients do. The first answer is part of the prompt, and the sieve sees the
second question.
"""

from __future__ import annotations

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.facts import draw_facts
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import spread_depths
from kvsieve.evals.tasks.task import CountTokens, Task


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    depths = spread_depths(count)
    builds = [_build(length, depth, index, seed) for index, depth in enumerate(depths)]
    return fit(MULTI_TURN.name, builds, count_tokens, length)


def _build(length: int, depth: float, index: int, seed: int) -> Build:
    facts = draw_facts(f"multi_turn/{length}/{seed}/{index}", depth)

    def build(units: int) -> Example:
        return Example(
            example_id=f"multi_turn/{length}/{depth:.2f}/{index}",
            task="multi_turn",
            context=facts.context(units),
            question=f"{facts.question(0)}\n{facts.answer(0)}\n\n{facts.question(1)}",
            references=(facts.values[1],),
            scorer="contains_all",
            max_tokens=16,
            answer_prefix=facts.answer_prefix(1),
            tags={"length": length, "depth": depth},
        )

    return build


MULTI_TURN = Task("multi_turn", "a second question, the conversation sent again", generate)
