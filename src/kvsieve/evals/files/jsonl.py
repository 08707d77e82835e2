"""Files with one JSON object a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvsieve.evals.example import Example
from kvsieve.evals.files.draw import Draw
from kvsieve.evals.files.format import MIB, Limits
from kvsieve.evals.files.problems import Problems
from kvsieve.evals.files.record import Record, kind

Build = Callable[[Record, str], Example]
"""`build(record, example_id)`: the example of a line; what is wrong goes into the record."""

OpenFile = Callable[[Path, Problems], Build | None]
"""What examples of one file are built by; None, and a problem, where the file has none."""


def load_examples(
    path: Path, open_file: OpenFile, *, name: str, count: int | None, seed: int, limits: Limits
) -> list[Example]:
    """Read the examples of a JSONL file, or of all of them in a folder and below.

    Args:
        path: The file or folder.
        open_file: Called once per file.
        name: The format, with which ids begin.
        count: Most examples of each file; None for all.
        seed: Of the draw.
        limits: How much is taken.

    Raises:
        ConfigError: With every reason.
    """
    problems = Problems()
    examples: list[Example] = []
    for file in files_at(path, ".jsonl", problems):
        build = open_file(file, problems)
        if build is None:
            continue
        place = (
            file.relative_to(path).with_suffix("").as_posix() if file != path else place_of(path)
        )
        draw: Draw[Example] = Draw(count, seed)
        is_empty = True
        for line, fields in read_objects(file, limits, problems):
            is_empty = False
            if fields is None:
                continue
            record = Record(fields)
            example_id = f"{name}/{place}/{line}"
            example = build(record, example_id)
            if record.wrong:
                problems.add(file, ", ".join(record.wrong), line)
            else:
                draw.offer(example_id, example)
        if is_empty:
            problems.add(file, "it holds no examples, only an empty file or blank lines")
        examples += draw.items()
    problems.raise_if_any()
    return examples


def place_of(file: Path) -> str:
    """What ids call a file that was given by itself: its folder tells it from others."""
    return "/".join(part for part in (file.resolve().parent.name, file.stem) if part)


def files_at(path: Path, suffix: str, problems: Problems) -> list[Path]:
    """The file itself, or every file of a folder and below that ends so, in order of name."""
    if path.is_file():
        return [path]
    if not path.exists():
        problems.add(path, "there is no such file or folder")
        return []
    # Files that begin with a dot are what file managers and archives leave behind.
    found = sorted(
        file for file in path.rglob(f"*{suffix}") if file.is_file() and file.name[0] != "."
    )
    if not found:
        problems.add(path, f"there is no {suffix} file in this folder or below")
    return found


def read_objects(
    path: Path, limits: Limits, problems: Problems
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number and object of each line that is not blank; None, and a problem, without one.

    UTF-8, with or without a byte-order mark; lines end as on any system.
    """
    try:
        with path.open("rb") as file:
            line = 0
            while raw := file.readline(limits.line_bytes + 1):
                line += 1
                if line == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        problems.add(path, "it is in UTF-16; save it as UTF-8")
                        yield line, None
                        return
                if len(raw) > limits.line_bytes:
                    while raw and not raw.endswith(b"\n"):
                        raw = file.readline(MIB)
                    problems.add(path, f"longer than {limits.line_bytes / MIB:g} MiB", line)
                    yield line, None
                elif raw.strip():
                    yield line, _object_of(raw, path, line, problems)
    except OSError as error:
        problems.add(path, f"it cannot be read: {error.strerror or error}")
        yield 0, None


def _object_of(raw: bytes, path: Path, line: int, problems: Problems) -> dict[str, Any] | None:
    try:
        value = json.loads(raw.decode().rstrip())
        # JSON can escape half of a surrogate pair, which no text that is sent may hold.
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at place {error.start + 1}"
        problems.add(path, f"not UTF-8: {found}; save the file as UTF-8", line)
    except UnicodeEncodeError:
        problems.add(path, "a text holds half of a surrogate pair, which is no character", line)
    except json.JSONDecodeError as error:
        problems.add(path, f"not JSON: {error.msg} at place {error.pos + 1}", line)
    except (ValueError, RecursionError) as error:
        problems.add(path, f"not readable as JSON: {error}", line)
    else:
        if isinstance(value, dict):
            return value
        problems.add(path, f"holds {kind(value)}; each line must be one JSON object", line)
    return None
