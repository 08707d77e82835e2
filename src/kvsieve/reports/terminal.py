"""A report's table on a terminal."""

from __future__ import annotations

import os
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvsieve.reports.table import Table, shown

WIDTH_OF_A_FILE = 160
"""Columns where the output goes to no terminal and nothing says how wide it is."""


def output_console() -> Console:
    """Standard output, wide enough for the tables where nobody looks at a terminal."""
    console = Console()
    is_told = console.is_terminal or "COLUMNS" in os.environ
    return console if is_told else Console(width=WIDTH_OF_A_FILE)


def print_table(console: Console, table: Table) -> None:
    """Print a table as the page shows it; without rows it is left out."""
    if not table.rows:
        return
    texts = shown(table, "")
    rich = RichTable(title=texts.caption, title_justify="left")
    for column in texts.columns:
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        # On a narrow terminal a number wraps, which is ugly, and is never cut, which is wrong.
        rich.add_column(column.name, justify=justify, overflow="fold")
    for row in texts.rows:
        # A cell may look like Rich's markup.
        rich.add_row(*map(Text, row))
    console.print(rich)
