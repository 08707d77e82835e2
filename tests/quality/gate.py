"""The quality gate: what the sieve costs on the real model, against committed bounds.

`make quality` judges; `python -m tests.quality.gate --write` measures anew and writes
`bounds.json`, to be committed with the reason for the change.

Everything is deterministic but rounding: the same prompts, greedy, the same weights. What a
change may move without harm are near ties, so a bound is the measured mean less twice its
standard error over the examples, which also is what another draw of examples would move it by;
where all examples agree, less what one example counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from kvsieve.demo.model import ensure_demo_model
from kvsieve.evals.record import Record
from kvsieve.evals.session import Session, evaluate
from kvsieve.evals.settings import every_setting
from kvsieve.evals.workload import Wanted

BOUNDS = Path(__file__).with_name("bounds.json")
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--kv-cache-memory-bytes", "3G", "--max-num-seqs", "24"),
)
BUDGETS = ("50%", "25%")


@dataclass(frozen=True)
class Suite:
    """What is measured.

    Attributes:
        name: Its name in `bounds.json`.
        policies: Policies that have bounds.
        tasks: Tasks of `kvsieve eval`.
        lengths: Lengths of the prompts, in tokens.
        count: Prompts per task and length.
        full_layers: Layers that keep everything.
    """

    name: str
    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    full_layers: int = 0


SHORT = Suite("short", ("kvsieve",), ("niah", "fidelity", "recall"), (1024,), 4)
LONG = Suite(
    "long",
    ("snapkv", "streaming_llm"),
    (
        *("niah", "niah_essay", "multi_turn", "second_question", "instruction"),
        *("fidelity", "recall"),
    ),
    (1024,),
    8,
    full_layers=3,
)
SUITES = {suite.name: suite for suite in (SHORT, LONG)}


@dataclass(frozen=True)
class Measure:
    """A figure per record; the lower, the worse.

    Attributes:
        name: Its name in `bounds.json`.
        value: The figure, or None where a record has none.
    """

    name: str
    value: Callable[[Record], float | None]


MEASURES = (
    Measure("score", lambda record: record.score),
    Measure("agreement", lambda record: record.agreement),
    Measure("minus_kl", lambda record: None if record.kl is None else -record.kl),
)


def run(suite: Suite, policies: tuple[str, ...], folder: Path) -> list[Record]:
    """Judge the policies on a suite, full KV included."""
    console = Console(stderr=True)
    session = Session(
        model=str(ensure_demo_model(console)),
        wanted=Wanted(suite.tasks, (), suite.lengths, suite.count, seed=0),
        settings=every_setting(policies, BUDGETS),
        chat=False,
        out=folder,
        sieve={"full_layers": suite.full_layers},
        flags=FLAGS,
        concurrency=4,
    )
    return evaluate(session, console).records


def means(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
    """Mean and margin of every measure, by setting, task and measure."""
    values: dict[str, list[float]] = {}
    for record in records:
        for measure in MEASURES:
            value = measure.value(record)
            if value is not None:
                key = f"{record.setting.name} / {record.task} / {measure.name}"
                values.setdefault(key, []).append(value)
    return {key: (statistics.fmean(found), _margin(found)) for key, found in values.items()}


def _margin(values: list[float]) -> float:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return 2 * error or 1 / len(values)


def below(records: Iterable[Record], bounds: dict[str, dict[str, float]]) -> list[str]:
    """Every mean below its bound, in words."""
    found = means(records)
    missing = [f"{key} was not measured" for key in bounds if key not in found]
    return missing + [
        f"{key}: {found[key][0]:.4f} is below {bound['bound']:.4f} (was {bound['mean']:.4f})"
        for key, bound in bounds.items()
        if key in found and found[key][0] < bound["bound"]
    ]


def read_bounds(suite: Suite) -> dict[str, dict[str, float]]:
    """The committed bounds of a suite."""
    bounds: dict[str, dict[str, float]] = json.loads(BOUNDS.read_text())[suite.name]["bounds"]
    return bounds


def main() -> None:
    """Measure the suites and write the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--only", choices=SUITES, help="one suite only")
    only = parser.parse_args().only
    content = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    for suite in [SUITES[only]] if only else SUITES.values():
        with tempfile.TemporaryDirectory() as folder:
            measured = means(run(suite, suite.policies, Path(folder)))
        content[suite.name] = {
            "suite": asdict(suite),
            "bounds": {
                key: {
                    "mean": round(mean, 5),
                    "margin": round(margin, 5),
                    "bound": round(mean - margin, 5),
                }
                for key, (mean, margin) in sorted(measured.items())
            },
        }
    BOUNDS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
