"""A result on the screen."""

from __future__ import annotations

from rich.console import Console

from kvsieve.bench.schema import BenchResult
from kvsieve.bench.sentences import load_text
from kvsieve.bench.tables import tables_of
from kvsieve.reports.terminal import print_table


def print_result(console: Console, result: BenchResult) -> None:
    """Print a complete result."""
    for workload in result.workloads:
        for table in tables_of(result, workload):
            print_table(console, table)
    console.print(load_text(result), highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
