"""InfiniteBench (arXiv:2402.13718): JSONL files of one task each, named after it.

Fields: id, context, input, answer, options. The published prompts are code, one per model, and
not with the data; these are our own, so scores compare settings but not papers. Answers that a
published prompt begins for the model are a few tokens longer here, where none is begun.
"""

# ruff: noqa: RUF001 - a Chinese prompt has Chinese punctuation

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path

from kvsieve.evals.example import Example
from kvsieve.evals.files.format import DEFAULT_LIMITS, Format, Limits
from kvsieve.evals.files.jsonl import Build, load_examples
from kvsieve.evals.files.problems import Problems
from kvsieve.evals.files.record import Record

LETTERS = ("A", "B", "C", "D")


@dataclass(frozen=True)
class InfiniteTask:
    """How a task is asked and judged.

    Attributes:
        scorer: The published metric.
        max_tokens: Length of an answer, in tokens.
        asks: The question where `input` is empty, as it is in some copies of the data.
        ends: What the prompt ends with.
        form: What `answer` holds: texts, numbers, or one of `options`.
    """

    scorer: str
    max_tokens: int
    asks: str = ""
    ends: str = "Answer:"
    form: str = "texts"


TASKS = {
    "passkey": InfiniteTask("digits", 16, "Which pass key does the text above hide?"),
    "number_string": InfiniteTask("digits", 24, "Which number does the text above hide?"),
    "kv_retrieval": InfiniteTask("kv", 50, ends="Value:"),
    "longbook_sum_eng": InfiniteTask(
        "rouge_l", 1200, "Sum up the book above in one to two pages.", "Summary:"
    ),
    "longbook_choice_eng": InfiniteTask("option", 40, form="options"),
    "longbook_qa_eng": InfiniteTask("f1", 40),
    "longbook_qa_chn": InfiniteTask("f1_zh", 40, ends="答案："),
    "longdialogue_qa_eng": InfiniteTask(
        "contains_any", 40, "Whose name has been replaced by $$MASK$$ in the script above?", "Name:"
    ),
    "math_find": InfiniteTask("number", 16, form="numbers"),
    "math_calc": InfiniteTask(
        "number_list",
        30_000,
        "Work through the expression above and list the value after each operation.",
        "Values:",
        form="numbers",
    ),
    "code_run": InfiniteTask("last_integer", 16, form="numbers"),
    "code_debug": InfiniteTask(
        "option",
        16,
        "One of these functions has an error that makes the code above fail. Which one?",
        form="options",
    ),
}
"""InfiniteBench's tasks by the names of their files, with its metrics."""


def load(
    path: Path, *, count: int | None = None, seed: int = 0, limits: Limits = DEFAULT_LIMITS
) -> list[Example]:
    """Read InfiniteBench files; see `Load`."""

    def open_file(file: Path, problems: Problems) -> Build | None:
        if file.stem in TASKS:
            return partial(build_example, name=file.stem, limits=limits)
        names = ", ".join(TASKS)
        problems.add(file, f"files are named after their task, and {file.stem} is none: {names}")
        return None

    return load_examples(
        path, open_file, name="infinitebench", count=count, seed=seed, limits=limits
    )


def build_example(record: Record, example_id: str, *, name: str, limits: Limits) -> Example:
    """The example of one line."""
    task = TASKS[name]
    asked = record.text("input", may_be_empty=True, optional=bool(task.asks)).strip() or task.asks
    if not asked and not record.wrong:
        record.wrong.append("`input` is empty")
    references = record.texts("answer")
    choices: tuple[str, ...] = ()
    if task.form == "options":
        options = record.texts("options")
        references = _letter_of(references, options, record)
        choices = LETTERS
        asked = "\n".join([asked, *map("{}. {}".format, LETTERS, options)])
        asked += "\nAnswer with the letter alone."
    elif task.form == "numbers" and not all(map(_is_number, references)):
        record.wrong.append("`answer` holds a text, where numbers belong")
    return Example(
        example_id=example_id,
        task=f"infinitebench/{name}",
        context=record.text("context"),
        question=f"{asked}\n{task.ends}",
        references=references,
        scorer=task.scorer,
        max_tokens=limits.answer(task.max_tokens),
        choices=choices,
        tags={"template": "generic", **record.tags(id="id")},
    )


def _letter_of(
    answer: tuple[str, ...], options: tuple[str, ...], record: Record
) -> tuple[str, ...]:
    """The right option's letter; the data names its text, or its text and its letter."""
    if len(options) != len(LETTERS):
        record.wrong.append(f"`options` has {len(options)} options, not {len(LETTERS)}")
    elif len(answer) == 2 and answer[1] in LETTERS:
        return answer[1:]
    elif len(answer) == 1 and answer[0] in options:
        return (LETTERS[options.index(answer[0])],)
    elif len(answer) == 1 and answer[0] in LETTERS:
        return answer
    elif answer:
        record.wrong.append("`answer` is none of `options`")
    return ()


def _is_number(text: str) -> bool:
    try:
        return Decimal(text).is_finite()
    except InvalidOperation:
        return False


INFINITEBENCH = Format(
    "infinitebench", "InfiniteBench: retrieval, books, code at 100k tokens", load
)
