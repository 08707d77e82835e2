"""A result on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from kvsieve.bench.schema import BenchResult
from kvsieve.bench.sentences import load_text
from kvsieve.bench.tables import tables_of
from kvsieve.reports.page import Table
from kvsieve.reports.table import shown


def print_result(console: Console, result: BenchResult) -> None:
    """Print a complete result."""
    for workload in result.workloads:
        for table in tables_of(result, workload):
            print_table(console, table)
    console.print(load_text(result), highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def print_table(console: Console, table: Table) -> None:
    """Print a report's table as the report shows it."""
    if not table.rows:
        return
    made = shown(table, "")
    rich = RichTable(title=made.caption, title_justify="left")
    for column in made.columns:
        rich.add_column(column.name, justify="right" if column.is_number else "left")
    for row in made.rows:
        # Brackets of an interval are no markup.
        rich.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(rich)
