"""What a run is: the facts that its results are published with, and those that must not change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsieve.evals.item import Item
from kvsieve.evals.passages import read_text
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.settings import Setting
from kvsieve.evals.workload import Wanted

_SAMPLES = 16
_SAMPLE_BYTES = 65536


def run_facts(
    model: str,
    wanted: Wanted,
    settings: Sequence[Setting],
    maker: PromptMaker,
    items: Sequence[Item],
) -> dict[str, Any]:
    """What is asked of which model, as JSON values."""
    text = read_text(wanted.text)
    return {
        "model": model,
        "model_files": model_files(model),
        "prompts": maker.provenance(),
        "stop": {item.task: list(item.example.stop) for item in items if item.example is not None},
        "tasks": list(wanted.tasks),
        "data": list(wanted.data),
        "lengths": list(wanted.lengths),
        "count": wanted.count,
        "seed": wanted.seed,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "max_prompt_tokens": wanted.max_prompt_tokens,
        "max_answer_tokens": wanted.max_answer_tokens,
        "settings": [setting.name for setting in settings],
        "longest": max(item.length for item in items),
        "temperature": 0.0,
    }


def identity(run: Mapping[str, Any], birth: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for a journal to be gone on with.

    What is asked is not in it: each record has its item's hash. What makes tokens of it is.
    """
    same = (
        *("model", "model_files", "seed", "text_sha256", "max_prompt_tokens"),
        *("sieve", "flags", "endpoint"),
    )
    return {
        **{name: run[name] for name in same},
        "template_sha256": run["prompts"]["template_sha256"],
        "versions": birth["versions"],
        "source_sha256": birth["source_sha256"],
    }


def model_files(model: str) -> str | None:
    """A hash of samples of a model folder's files; None if it is no folder.

    A checkpoint is overwritten under its name while its training goes on. The whole of it takes
    minutes to read; sixteen places of each file are enough to see that.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
