"""The page: rank variance by layer, where prompts were pruned, accuracy against cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.reports.figures import Figure, Reference, Series, line_figure, scatter_figure
from kvsieve.reports.page import Section, render_page
from kvsieve.reports.table import Table
from selection.plan import FULL
from selection.summary import ALL

Rows = Sequence[Mapping[str, Any]]


def selection_page(
    summary: Mapping[str, Any], sentences: Sequence[str], birth: Mapping[str, Any]
) -> str:
    """The experiment as HTML."""
    sections = []
    for budget, found in summary["budgets"].items():
        sections += [
            Section(
                f"Rank variance, {budget} kept",
                "How much the ranks of tokens still move over eight layers, over the same at ASL's"
                " first judged layer. Median of the prompts of both splits, band: quartiles.",
                figures=(variance_figure(budget, found["variance"]),),
                tables=(_layers_table(found),) if found["layers"] else (),
            ),
            Section(
                f"Accuracy and cost, {budget} kept",
                "A fixed layer scores tokens as ASL does: nothing but the choice of the layer"
                " differs. Bars: 95%.",
                figures=tuple(
                    cost_figure(budget, task, _rows(found["rows"], task))
                    for task in (ALL, *found["variance"])
                    if _rows(found["rows"], task)
                ),
                tables=(_rows_table(found["rows"]), _compared_table(found["compared"])),
            ),
        ]
    return render_page(
        "Where prompts are pruned", summary=sentences, sections=sections, provenance=birth
    )


def variance_figure(budget: str, curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Relative variance by layer, one line per task."""
    return line_figure(
        [
            Series(task, curve["layers"], curve["median"], curve["low"], curve["high"])
            for task, curve in curves.items()
        ],
        title=f"Rank variance by layer, {budget} of the prompt kept",
        x_label="layer",
        y_label="variance over that at the first judged layer",
    )


def cost_figure(budget: str, task: str, rows: Rows) -> Figure:
    """Score against the computed share: fixed layers are a line, every other method a point."""
    fixed = [row for row in rows if row["method"].startswith("fixed@")]
    others = [row for row in rows if row not in fixed and row["method"] != FULL]
    series = [_series("fixed layer", fixed)] if fixed else []
    series += [_series(row["method"], [row]) for row in others]
    full = next((row for row in rows if row["method"] == FULL), None)
    return scatter_figure(
        series,
        title=f"{task}, {budget} kept",
        x_label="prefill work done, share of the unpruned prompt's",
        y_label="share answered rightly",
        y_range=(0.0, 1.0),
        reference=Reference(FULL, full["score"]) if full else None,
        connect=True,
    )


def _series(name: str, rows: Rows) -> Series:
    return Series(
        name,
        [row["computed_share"] for row in rows],
        [row["score"] for row in rows],
        [row["low"] for row in rows],
        [row["high"] for row in rows],
        [row["method"].partition("@")[2] if name == "fixed layer" else "" for row in rows],
    )


def _rows(rows: Rows, task: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["task"] == task]


def _layers_table(found: Mapping[str, Any]) -> Table:
    return Table(
        ("task", "mean layer", "layers", "reasons"),
        tuple(
            (
                task,
                one["mean"],
                " ".join(map(str, one["layers"])),
                ", ".join(f"{count} {reason}" for reason, count in one["reasons"].items()),
            )
            for task, one in found["layers"].items()
        ),
        "Where ASL pruned the prompts",
    )


def _rows_table(rows: Rows) -> Table:
    return Table(
        ("task", "method", "n", "right", "95%", "work done"),
        tuple(
            (
                row["task"],
                row["method"],
                row["n"],
                f"{100 * row['score']:.0f}%",
                f"{100 * row['low']:.0f} to {100 * row['high']:.0f}%",
                f"{100 * row['computed_share']:.0f}%",
            )
            for row in rows
        ),
        "Score and cost",
    )


def _compared_table(rows: Rows) -> Table:
    return Table(
        ("ASL against", "prompts", "points", "95%", "won", "lost", "work, points"),
        tuple(
            (
                row["against"],
                row["n"],
                f"{100 * row['score']:+.0f}",
                f"{100 * row['low']:+.0f} to {100 * row['high']:+.0f}",
                row["won"],
                row["lost"],
                f"{100 * row['computed_share']:+.0f}",
            )
            for row in rows
        ),
        "ASL less each fixed layer, prompt by prompt, over all tasks",
    )
