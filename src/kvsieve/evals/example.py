"""One question of an evaluation: what is asked, and what a right answer says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Example:
    """One prompt with its references.

    The prompt is `context` and then `question`, with `system` before them and
    `answer_prefix` after; the parts are kept apart because a chat template puts marks
    between them, and because a report shows where the question stands.

    Attributes:
        example_id: Unique in a run and the same in every run with the same seed, such as
            "niah/1024/0.50/3".
        task: Name of the task, as `--tasks` takes it.
        context: The long part, with the task's instruction in front where there is one.
        question: What is asked, after the context.
        references: Answers that count as right; how they count is the scorer's matter.
        scorer: Name of the scorer in `kvsieve.evals.metrics.SCORERS`.
        max_tokens: Most tokens of the answer.
        system: The system message; without a chat template it comes first, as text.
        answer_prefix: What the answer is made to begin with; it is part of the prompt.
        stop: Texts that end the answer.
        choices: What the answer is chosen from, for scorers of choices.
        after_sieve: Text that the model is made to say once the prompt has been read and
            sieved, and that the answer follows. A question in it is one that the sieve
            did not see.
        tags: What groups of examples are made by, such as depth and length.
    """

    example_id: str
    task: str
    context: str
    question: str
    references: tuple[str, ...]
    scorer: str
    max_tokens: int
    system: str = ""
    answer_prefix: str = ""
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    after_sieve: str = ""
    tags: Mapping[str, int | float | str] = field(default_factory=dict)
