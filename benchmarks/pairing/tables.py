"""Results as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pairing.host import PARTS


def print_summary(console: Console, name: str, result: dict[str, Any]) -> None:
    """One measurement's summary: median, range and, where there is one, the aim."""
    table = Table(title=name, title_justify="left")
    table.add_column("quantity")
    for column in ("median", "min", "max", "repeats", "aim"):
        table.add_column(column, justify="right")
    for quantity, values in result["summary"].items():
        aim = values.get("aim", "")
        if aim:
            aim += " met" if values["met"] else " MISSED"
        table.add_row(
            quantity,
            *(_number(values[key]) for key in ("median", "min", "max")),
            str(values["repeats"]),
            aim,
        )
    console.print(table)


def print_host(console: Console, result: dict[str, Any]) -> None:
    """Host time per step, in milliseconds: a row per arm, a column per part."""
    columns = (*PARTS, "host", "step_without_forward")
    for batch, measured in result["batches"].items():
        table = Table(title=f"host, {batch} decoding requests, ms per step", title_justify="left")
        table.add_column("arm")
        table.add_column("groups", justify="right")
        for column in columns:
            table.add_column(column.replace("_", " "), justify="right")
        for arm, summary in measured["summary"].items():
            groups = len(result["arms"][arm]["groups"])
            cells = [f"{summary['ms'][column]['median']:.2f}" for column in columns]
            table.add_row(arm, str(groups), *cells)
        console.print(table)


def _number(value: float) -> str:
    return f"{value:.4g}"
