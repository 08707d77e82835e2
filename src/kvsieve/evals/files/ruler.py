"""RULER (arXiv:2404.06654): the JSONL files that its generators write.

Fields: index, input, outputs, length; newer generators also write answer_prefix, and then leave
it out of the input. The prompt is used as it is, chat marks and all, uncut: its question follows
the haystack after a single line break, so it is a part of the context here.

The task is the name of the file (`niah_single_1.jsonl`) or of its folder
(`niah_single_1/validation.jsonl`); what it begins with decides the metric and the answer's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvsieve.evals.example import Example
from kvsieve.evals.files.format import DEFAULT_LIMITS, Format, Limits
from kvsieve.evals.files.jsonl import Build, load_examples
from kvsieve.evals.files.problems import Problems
from kvsieve.evals.files.record import Record


@dataclass(frozen=True)
class Category:
    """Tasks that are judged in the same way: the published metric, and tokens of an answer."""

    scorer: str
    max_tokens: int


CATEGORIES = {
    "niah": Category("contains_all", 128),
    "vt": Category("contains_all", 30),
    "variable_tracking": Category("contains_all", 30),
    "cwe": Category("contains_all", 120),
    "common_words_extraction": Category("contains_all", 120),
    "fwe": Category("contains_all", 50),
    "freq_words_extraction": Category("contains_all", 50),
    "qa": Category("contains_any", 32),
}
"""By what a task's name begins with, alone or before an underscore."""


def load(
    path: Path, *, count: int | None = None, seed: int = 0, limits: Limits = DEFAULT_LIMITS
) -> list[Example]:
    """Read RULER files; see `Load`."""

    def open_file(file: Path, problems: Problems) -> Build | None:
        for name in (file.stem, file.resolve().parent.name):
            category = category_of(name)
            if category is not None:
                return partial(
                    build_example,
                    task=name,
                    category=category,
                    length=nominal_length(file),
                    limits=limits,
                )
        names = ", ".join(CATEGORIES)
        problems.add(
            file, f"neither the file nor its folder is named after a task that begins with {names}"
        )
        return None

    return load_examples(path, open_file, name="ruler", count=count, seed=seed, limits=limits)


def category_of(task: str) -> Category | None:
    """The category of a task, or None if the name is no task's."""
    for prefix, category in CATEGORIES.items():
        if task == prefix or task.startswith(f"{prefix}_"):
            return category
    return None


def nominal_length(file: Path) -> int | None:
    """The prompts' length in tokens, where a folder above the file is named after it."""
    names = (folder.name for folder in file.resolve().parents)
    lengths = (int(name) for name in names if re.fullmatch("[1-9][0-9]{2,8}", name))
    return next(lengths, None)


def build_example(
    record: Record,
    example_id: str,
    *,
    task: str,
    category: Category,
    length: int | None,
    limits: Limits,
) -> Example:
    """The example of one line."""
    tags = record.tags(source_tokens="length")
    if length is not None:
        tags["length"] = length
    prompt = record.text("input")
    prefix = record.text("answer_prefix", may_be_empty=True, optional=True)
    return Example(
        example_id=example_id,
        task=f"ruler/{task}",
        context=prompt,
        question="",
        references=record.texts("outputs"),
        scorer=category.scorer,
        max_tokens=limits.answer(category.max_tokens),
        answer_prefix="" if prompt.endswith(prefix) else prefix,
        tags=tags,
    )


RULER = Format("ruler", "RULER: needles, variables, word counts, questions in synthetic text", load)
