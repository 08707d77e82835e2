"""Records in the published formats of example files, and what their loaders make of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvsieve.core.errors import ConfigError
from kvsieve.evals.example import Example
from kvsieve.evals.files import FORMATS
from kvsieve.evals.files.template import BETWEEN


def write(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def longbench_record(**changes: Any) -> dict[str, Any]:
    record = {
        "input": "Who came?",
        "context": "Ann came. Bob left.",
        "answers": ["Ann", "Ann Lee"],
        "length": 4,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "0f3a",
    }
    return {name: value for name, value in {**record, **changes}.items() if value is not ...}


def ruler_record(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "input": "hay\nWhat is it?", "outputs": ["71"], "length": 9, **changes}


def infinite_record(**changes: Any) -> dict[str, Any]:
    record = {"id": 3, "context": "x " * 9, "input": "Which?", "answer": ["7"], "options": []}
    return {**record, **changes}


def load(name: str, path: Path, **options: Any) -> list[Example]:
    return FORMATS[name].load(path, **options)


def prompt_of(example: Example) -> str:
    return BETWEEN.join(part for part in (example.context, example.question) if part)


def reasons_of(name: str, path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(name, path, **options)
    return caught.value.reasons
