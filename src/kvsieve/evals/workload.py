"""From what the user asked for to the items of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsieve.core.errors import ConfigError
from kvsieve.evals.files import FORMATS, Limits
from kvsieve.evals.item import Item
from kvsieve.evals.passages import PASSAGE_TASKS, passage_items, read_text
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.tasks import TASKS

TASK_NAMES = (*TASKS, *PASSAGE_TASKS)
DEFAULT_TASKS = ("niah", "niah_essay", "second_question", "instruction", "fidelity", "recall")


@dataclass(frozen=True)
class Wanted:
    """What is to be asked.

    Attributes:
        tasks: Names of generated tasks and of those over real text.
        data: Files in published formats, as "FORMAT:PATH".
        lengths: Lengths of generated prompts, in tokens.
        count: Examples per task and length, and per file.
        seed: Of everything that is drawn.
        text: File with the real text; None for the report that comes with kvsieve.
        max_answer_tokens: Answers of files are cut at so many tokens, where a format's own
            length is larger.
        max_prompt_tokens: Longer prompts from files lose the middle of their context.
    """

    tasks: tuple[str, ...]
    data: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    text: Path | None = None
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None


def check_wanted(wanted: Wanted) -> list[str]:
    """Reasons why this cannot be asked, found without reading anything."""
    reasons = [
        f"there is no task {name!r}; tasks: {', '.join(TASK_NAMES)}"
        for name in wanted.tasks
        if name not in TASK_NAMES
    ]
    for given in wanted.data:
        form, colon, path = given.partition(":")
        if not colon or form not in FORMATS:
            reasons.append(
                f"--data takes FORMAT:PATH with a format of {', '.join(FORMATS)} (given: {given!r})"
            )
        elif not Path(path).exists():
            reasons.append(f"--data {given}: there is no {path}")
    if not wanted.tasks and not wanted.data:
        reasons.append("there is nothing to do: give --tasks or --data")
    if wanted.tasks and not wanted.lengths:
        reasons.append("give the lengths of the prompts (--lengths)")
    if wanted.text is not None and not wanted.text.is_file():
        reasons.append(f"--text: there is no file {wanted.text}")
    if wanted.text is not None and not set(wanted.tasks) & PASSAGE_TASKS.keys():
        reasons.append(f"--text is used by {' and '.join(PASSAGE_TASKS)} alone: leave it out")
    for option, value in (
        ("--max-prompt-tokens", wanted.max_prompt_tokens),
        ("--max-answer-tokens", wanted.max_answer_tokens),
    ):
        if value is not None and not wanted.data:
            reasons.append(f"{option} is for files (--data): leave it out")
    given_twice = [
        *_twice("--tasks", wanted.tasks),
        *_twice("--lengths", wanted.lengths),
        *_twice("--data", wanted.data),
    ]
    return reasons + given_twice


def _twice(option: str, values: Sequence[str | int]) -> list[str]:
    return [f"{option}: {value} is given twice" for value, n in Counter(values).items() if n > 1]


def make_items(wanted: Wanted, maker: PromptMaker) -> list[Item]:
    """The items of a run: the same for the same arguments, on any machine.

    Raises:
        ConfigError: A length or a file does not serve; every reason at once.
    """
    reasons: list[str] = []
    items: list[Item] = []
    is_text_read = any(name in PASSAGE_TASKS for name in wanted.tasks)
    text_ids = maker.encode(read_text(wanted.text)) if is_text_read else []
    too_long = [length for length in wanted.lengths if length > maker.max_length]
    if wanted.tasks and too_long:
        raise ConfigError(
            [
                f"prompts of {length} tokens are longer than the {maker.max_length} that the model"
                " takes: give other --lengths"
                for length in too_long
            ]
        )
    for name in wanted.tasks:
        for length in wanted.lengths:
            try:
                items += _generated(name, length, wanted, maker, text_ids)
            except ConfigError as error:
                reasons.extend(error.reasons)
    for given in wanted.data:
        form, _, path = given.partition(":")
        try:
            limits = Limits(answer_tokens=wanted.max_answer_tokens)
            examples = FORMATS[form].load(
                Path(path), count=wanted.count, seed=wanted.seed, limits=limits
            )
            items += [maker.item(example, wanted.max_prompt_tokens) for example in examples]
        except ConfigError as error:
            reasons.extend(error.reasons)
    if reasons:
        raise ConfigError(reasons)
    _check_unique(items)
    return items


def _generated(
    name: str, length: int, wanted: Wanted, maker: PromptMaker, text_ids: Sequence[int]
) -> list[Item]:
    if task := PASSAGE_TASKS.get(name):
        return passage_items(
            task,
            text_ids,
            length=length,
            count=wanted.count,
            seed=wanted.seed,
            beginning=maker.beginning,
        )
    examples = TASKS[name].generate(maker.count_tokens, length, wanted.count, wanted.seed)
    return [maker.item(example) for example in examples]


def _check_unique(items: Sequence[Item]) -> None:
    counts = Counter(item.item_id for item in items)
    twice = sorted(item_id for item_id, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(
            [
                f"{len(twice)} names are those of two examples each, such as {twice[0]!r}: files of"
                " the same name need runs of their own (--out)"
            ]
        )


def floors(items: Sequence[Item]) -> dict[str, float]:
    """Score by task of an answer that has not read the context, in [0, 1].

    Of generated tasks it is known, and where one of some choices is right it is chance. Files
    of other kinds have none that is known, and 0 is taken.
    """
    shares: dict[str, list[float]] = {}
    for item in items:
        example = item.example
        if example is not None and item.task not in TASKS:
            right = len(set(example.references) & set(example.choices))
            shares.setdefault(item.task, []).append(
                right / len(example.choices) if example.choices else 0.0
            )
    by_chance = {task: sum(found) / len(found) for task, found in shares.items()}
    return {name: task.floor for name, task in TASKS.items()} | by_chance
