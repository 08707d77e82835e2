"""MMLU (arXiv:2009.03300): CSV files without a header: question, A, B, C, D, answer.

A folder with `test/SUBJECT_test.csv` and `dev/SUBJECT_dev.csv` is asked with the first five
questions of the same subject's dev file as examples, as published; a single file without any.
The wording of the prompt is our own, and the answer is what the model writes, where the
published code compares the probabilities of the four letters.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsieve.evals.example import Example
from kvsieve.evals.files.draw import Draw
from kvsieve.evals.files.format import DEFAULT_LIMITS, Format, Limits
from kvsieve.evals.files.jsonl import files_at
from kvsieve.evals.files.problems import Problems

LETTERS = ("A", "B", "C", "D")
SHOTS = 5
MAX_TOKENS = 8
"""Room for a letter, and for the few words that a chat model may put before it."""


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        line: Line of the file where it ends, from 1.
        question: The question.
        options: The four options.
        answer: The right one's letter.
    """

    line: int
    question: str
    options: tuple[str, ...]
    answer: str

    def text(self) -> str:
        """The question with its options, up to where the letter belongs."""
        options = (f"{letter}. {text}" for letter, text in zip(LETTERS, self.options, strict=True))
        return "\n".join([self.question, *options, "Answer:"])


def load(
    path: Path, *, count: int | None = None, seed: int = 0, limits: Limits = DEFAULT_LIMITS
) -> list[Example]:
    """Read MMLU files; see `Load`. `count` is that of all subjects together."""
    problems = Problems()
    draw: Draw[Example] = Draw(count, seed)
    for file in _tests_at(path, problems):
        subject = file.stem.removesuffix("_test")
        shots = _shots_of(path, subject, problems) if path.is_dir() else []
        is_empty = True
        for row in read_rows(file, limits, problems):
            is_empty = False
            if row is not None:
                example = _example(row, subject, shots, limits)
                draw.offer(example.example_id, example)
        if is_empty:
            problems.add(file, "it holds no questions, only an empty file or blank lines")
    problems.raise_if_any()
    return draw.items()


def _tests_at(path: Path, problems: Problems) -> list[Path]:
    if not path.is_dir():
        return files_at(path, ".csv", problems)
    missing = [name for name in ("test", "dev") if not (path / name).is_dir()]
    for name in missing:
        problems.add(path, f"there is no folder `{name}`, as MMLU has; give a CSV file, or MMLU's")
    return [] if missing else files_at(path / "test", "_test.csv", problems)


def _shots_of(folder: Path, subject: str, problems: Problems) -> list[Row]:
    file = folder / "dev" / f"{subject}_dev.csv"
    if not file.is_file():
        problems.add(file, "there is no such file, from which the examples would come")
        return []
    rows = list(read_rows(file, DEFAULT_LIMITS, problems))
    if not rows:
        problems.add(file, "it holds no questions, which the examples would be")
    return [row for row in rows if row is not None][:SHOTS]


def _example(row: Row, subject: str, shots: list[Row], limits: Limits) -> Example:
    topic = subject.replace("_", " ")
    intro = f"Questions on {topic}. Each has four options, and the letter of the right one follows."
    return Example(
        example_id=f"mmlu/{subject}/{row.line}",
        task="mmlu",
        context="\n\n".join([intro, *(f"{shot.text()} {shot.answer}" for shot in shots)]),
        question=row.text(),
        references=(row.answer,),
        scorer="option",
        max_tokens=limits.answer(MAX_TOKENS),
        choices=LETTERS,
        tags={"subject": subject, "shots": len(shots)},
    )


def read_rows(path: Path, limits: Limits, problems: Problems) -> Iterator[Row | None]:
    """The questions of a file; None, and a problem, for what is none. Blank lines are passed."""
    line = 0
    try:
        if path.stat().st_size > limits.line_bytes:
            problems.add(path, f"it is larger than {limits.line_bytes} bytes")
            yield None
            return
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                line = reader.line_num
                if any(cell.strip() for cell in cells):
                    wrong = _wrong_with(cells)
                    if wrong:
                        problems.add(path, wrong, line)
                    yield (
                        None
                        if wrong
                        else Row(line, cells[0].strip(), tuple(cells[1:5]), cells[5].strip())
                    )
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x}"
        problems.add(path, f"not UTF-8 ({found}), after line {line}; save the file as UTF-8")
        yield None
    except csv.Error as error:
        problems.add(path, f"not CSV: {error}", line + 1)
        yield None
    except OSError as error:
        problems.add(path, f"it cannot be read: {error.strerror or error}")
        yield None


def _wrong_with(cells: list[str]) -> str:
    """Why a row is no question, or nothing."""
    if len(cells) != 6:
        return f"{len(cells)} cells, not the 6 of question, A, B, C, D, answer"
    if not cells[0].strip():
        return "the question is empty"
    if cells[5].strip() not in LETTERS:
        return f"the answer is {cells[5].strip()[:40]!r}, not one of A, B, C, D"
    return ""


MMLU = Format("mmlu", "MMLU: multiple choice on 57 subjects, five examples in the prompt", load)
