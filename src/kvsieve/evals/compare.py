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

_MATTERS = (
    *("model", "model_files", "prompts", "seed", "text_sha256", "sieve", "flags", "endpoint"),
    *("max_prompt_tokens", "max_answer_tokens"),
)
"""Fields of a run that decide whether scores mean the same."""


_MANY = 20
"""With so many 95% intervals one is expected to miss."""


class Change(BaseModel):
    """A task under a setting, in both evaluations.

    Attributes:
        task: The task.
        setting: The setting.
        before: Score of the first.
        after: Score of the second.
        change: Second less first, over the examples that both asked, which are those with
            the same text; None if there are none.
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
    except (OSError, ValueError, RecursionError) as error:
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
    scores: list[dict[tuple[str, str], float]] = []
    for results in (before, after):
        beyond = results.beyond_the_model
        found: dict[tuple[str, str], float] = {}
        for record in results.records:
            is_in = record.task not in beyond if task == "all" else record.task == task
            if is_in and record.setting.name == setting:
                # Full KV was asked on the server of every policy: the first one's counts.
                found.setdefault((record.item_id, record.item_sha256), quality(record))
        scores.append(found)
    common = [item for item in scores[0] if item in scores[1]]
    if not common:
        return None
    first, second = ([each[item] for item in common] for each in scores)
    if first == second:
        # The same questions with the same scores: nothing is left to chance.
        return Interval(value=0.0, low=0.0, high=0.0, count=len(common))
    return Interval.of(paired_difference(second, first, seed))


def _differing(before: EvalResults, after: EvalResults) -> list[str]:
    earlier, later = _facts(before), _facts(after)
    return [
        f"{name}: {_short(earlier.get(name))} before, {_short(later.get(name))} after"
        for name in dict.fromkeys((*earlier, *later))
        if earlier.get(name) != later.get(name)
    ]


def _facts(results: EvalResults) -> dict[str, Any]:
    """What decides about a run's scores, by name; of objects each value by itself."""
    run, birth = results.run, results.provenance
    machine = birth.get("machine")
    facts = {name: run.get(name) for name in _MATTERS}
    facts |= {name: birth.get(name) for name in ("commit", "source_sha256", "versions")}
    facts["machine"] = (
        {name: machine.get(name) for name in ("cpu", "gpus")} if isinstance(machine, dict) else None
    )
    facts["tasks beyond the model"] = results.beyond_the_model
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name} {key}".strip(): each for key, each in inner}
    return flat


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
    if sentences and len(comparison.changes) >= _MANY:
        by_chance = 0.05 * len(comparison.changes)
        sentences.append(
            f"Of {len(comparison.changes)} comparisons about {by_chance:.0f} would look like that"
            " by chance."
        )
    alone = [c for c in comparison.changes if c.change is None]
    if len(alone) == len(comparison.changes):
        sentences.append(
            "Nothing can be said: the two evaluations have no example in common. They share their"
            " examples if tasks, lengths, files and --seed are the same."
        )
    elif alone:
        names = ", ".join(f"{c.task} with {c.setting}" for c in alone)
        sentences.append(f"Without an example in common, and not compared: {names}.")
    if not worse and not better and len(alone) < len(comparison.changes):
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
        f"Two evaluations of {Path(str(after.run.get('model', 'a model'))).name}",
        summary=verdict(comparison),
        sections=sections,
        provenance={**after.provenance, "before": before.provenance},
    )
