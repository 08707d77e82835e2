"""One figure of every kind, and a page of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from kvsieve.reports.figures import (
    Bars,
    Figure,
    Mark,
    Reference,
    Series,
    bar_figure,
    heat_figure,
    line_figure,
    scatter_figure,
    trade_off_figure,
)
from kvsieve.reports.page import Section, Table, render_page
from kvsieve.reports.provenance import provenance

BUDGETS = ("3%", "6%", "12%", "25%", "50%")


def series(name: str, *y: float, labels: tuple[str, ...] = BUDGETS) -> Series:
    x = (5, 8, 14, 27, 52)
    low, high = [max(0, one - 0.05) for one in y], [min(1, one + 0.04) for one in y]
    return Series(name, x, y, low, high, labels)


@functools.cache
def trade_off() -> Figure:
    return trade_off_figure(
        [
            series("snapkv", 0.31, 0.52, 0.74, 0.83, 0.86),
            series("streaming", 0.11, 0.15, 0.24, 0.45, 0.66),
            series("nearly the first", 0.33, 0.5, 0.72, 0.84, 0.85),
        ],
        full=Reference("full KV", 0.87, 0.83, 0.91),
        recommended=Mark("recommended: snapkv, 25%", 27, 0.83),
        caption="Whiskers are 95% intervals.",
    )


@functools.cache
def lines(count: int = 3) -> Figure:
    return line_figure(
        [series(f"policy {i}", *(0.9 - 0.1 * i - 0.02 * j for j in range(5))) for i in range(count)]
        if count
        else [],
        x_label="prompt, tokens",
        y_label="score",
        title="Score by prompt length",
    )


@functools.cache
def bars(name: str = "multi-key needle") -> Figure:
    return bar_figure(
        ["single needle", name, "a task whose name goes on and on, over two lines"],
        [
            Bars("full", (1.0, 0.9, 0.8), (0.95, 0.8, 0.7), (1.0, 0.95, 0.9)),
            Bars("25%", (1.0, math.nan, 0.7), (0.9, math.nan, 0.6), (1.0, math.nan, 0.8)),
        ],
        value_label="score",
        value_range=(0, 1),
    )


@functools.cache
def heat(rows: int = 5, columns: int = 8) -> Figure:
    return heat_figure(
        [[None if i == j == 2 else (i + j) / 12 for j in range(columns)] for i in range(rows)],
        row_labels=[f"{25 * i}%" for i in range(rows)],
        column_labels=[f"{1000 * i:,}" for i in range(columns)],
        row_label="depth of the needle",
        column_label="prompt, tokens",
        title="Needle found",
        value_label="share found",
    )


def dots() -> Figure:
    return scatter_figure(
        [series("a", 0.1, math.nan, 0.3, 0.4, 0.5)], x_label="x", y_label="y", title="Dots"
    )


FIGURES: dict[str, Callable[[], Figure]] = {
    "trade-off": trade_off,
    "lines": lines,
    "bars": bars,
    "heat": heat,
    "wide heat": lambda: heat(30, 28),
    "heat without numbers": lambda: heat(40, 64),
    "dots": dots,
}


def page_of(*figures: Figure, text: str = "Some text.") -> str:
    table = Table(
        ("policy", "budget", "score", "interval", *(f"layer {i}" for i in range(12))),
        (
            ("snapkv", "25%", 0.83, "0.79 to 0.87", *(i / 7 for i in range(12))),
            (text, "full", None, "0.83 to 0.91", *range(12)),
        ),
        "Every budget",
    )
    return render_page(
        f"Report: {text}",
        summary=["Take 25%.", text],
        sections=[
            Section("Which budget?", f"{text}\n\nSecond paragraph.", figures[:1], (table,)),
            Section(text, "", figures[1:]),
        ],
        provenance={**provenance(seed=3), "note": text},
    )
