"""Two evaluations side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvsieve.core.errors import ConfigError
from kvsieve.evals.results import SCHEMA, EvalResults, Interval, quality
from kvsieve.evals.statistics import paired_difference
from kvsieve.reports.page import Section, render_page
from kvsieve.reports.table import Table

_MATTERS = ("model", "prompts", "seed", "text_sha256", "sieve")
"""Fields of a run that decide whether scores mean the same."""


class Change(BaseModel):
    """A task under a setting, in both evaluations.

    Attributes:
        task: The task.
        setting: The setting.
        before: Score of the first.
        after: Score of the second.
        change: Second less first, over the examples that both have; None if there are none.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    setting: str
    before: Interval
    after: Interval
    change: Interval | None


class Comparison(BaseModel):
    """Two evaluations.

    Attributes:
        differing: What differs between the runs besides the results, in sentences.
        changes: Tasks and settings that both have.
        only_in_one: Tasks and settings that one of them lacks.
    """

    differing: list[str]
    changes: list[Change]
    only_in_one: list[str]


def load_results(path: Path) -> EvalResults:
    """Read a results file.

    Raises:
        ConfigError: It cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot read {path}: {error}"]) from None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind != "eval":
        raise ConfigError([f"{path} is no result of kvsieve eval (kind: {kind!r})"])
    if content.get("schema_version") != SCHEMA:
        version = content.get("schema_version")
        raise ConfigError([f"{path} has layout {version}, and this kvsieve reads {SCHEMA}"])
    try:
        return EvalResults.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError([f"{path} is damaged: {where}: {first['msg']}"]) from None


def compare_results(before: EvalResults, after: EvalResults, seed: int = 0) -> Comparison:
    """Line up what both have, and pair the examples that both asked.

    Raises:
        ConfigError: They have nothing in common.
    """
    earlier = {(result.task, result.setting): result for result in before.tasks}
    later = {(result.task, result.setting): result for result in after.tasks}
    both = [key for key in earlier if key in later]
    if not both:
        raise ConfigError(["the two evaluations have no task and setting in common"])
    changes = [
        Change(
            task=task,
            setting=setting,
            before=earlier[task, setting].score,
            after=later[task, setting].score,
            change=_paired(before, after, task, setting, seed),
        )
        for task, setting in both
    ]
    lone = [f"{task}, {setting}" for task, setting in earlier.keys() ^ later.keys()]
    return Comparison(
        differing=_differing(before, after), changes=changes, only_in_one=sorted(lone)
    )


def _paired(
    before: EvalResults, after: EvalResults, task: str, setting: str, seed: int
) -> Interval | None:
    scores: list[dict[str, float]] = []
    for results in (before, after):
        beyond = results.beyond_the_model
        scores.append(
            {
                record.item_id: quality(record)
                for record in results.records
                if record.setting.name == setting
                and (record.task not in beyond if task == "all" else record.task == task)
            }
        )
    common = [item_id for item_id in scores[0] if item_id in scores[1]]
    if not common:
        return None
    first, second = ([each[item_id] for item_id in common] for each in scores)
    return Interval.of(paired_difference(second, first, seed))


def _differing(before: EvalResults, after: EvalResults) -> list[str]:
    pairs: list[tuple[str, Any, Any]] = [
        (name, before.run.get(name), after.run.get(name)) for name in _MATTERS
    ]
    for name in ("commit", "source_sha256", "versions"):
        pairs.append((name, before.provenance.get(name), after.provenance.get(name)))
    machines = [one.provenance.get("machine", {}).get("cpu") for one in (before, after)]
    pairs.append(("machine", *machines))
    return [
        f"{name}: {_short(one)} before, {_short(two)} after"
        for name, one, two in pairs
        if one != two
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def comparison_table(comparison: Comparison) -> Table:
    """Both scores and the change, per task and setting."""
    rows = tuple(
        (
            change.task,
            change.setting,
            f"{100 * change.before.value:.1f}",
            f"{100 * change.after.value:.1f}",
            _change(change.change),
            change.change.count if change.change else 0,
        )
        for change in comparison.changes
    )
    return Table(
        columns=("task", "setting", "before, %", "after, %", "change, points", "examples in both"),
        rows=rows,
        caption="The change is of the examples that both asked, with its 95% interval.",
    )


def _change(change: Interval | None) -> str | None:
    if change is None:
        return None
    value, low, high = (100 * part for part in (change.value, change.low, change.high))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def verdict(comparison: Comparison) -> list[str]:
    """The comparison in a few sentences."""
    worse = [c for c in comparison.changes if c.change and c.change.high < 0]
    better = [c for c in comparison.changes if c.change and c.change.low > 0]
    sentences = [
        f"{what}: " + ", ".join(f"{c.task} with {c.setting}" for c in found) + "."
        for what, found in (("Clearly worse", worse), ("Clearly better", better))
        if found
    ]
    if not sentences:
        sentences.append("Nothing changed beyond what chance explains.")
    if comparison.differing:
        sentences.append("The runs differ in: " + "; ".join(comparison.differing) + ".")
    return sentences


def comparison_page(comparison: Comparison, before: EvalResults, after: EvalResults) -> str:
    """The whole page, one HTML file."""
    sections = [Section("Task by task", tables=(comparison_table(comparison),))]
    if comparison.only_in_one:
        text = "Only one of the two has: " + "; ".join(comparison.only_in_one) + "."
        sections.append(Section("Not compared", text))
    return render_page(
        f"Two evaluations of {after.run['model']}",
        summary=verdict(comparison),
        sections=sections,
        provenance={**after.provenance, "before": before.provenance},
    )
