"""Tables of a report: cells as text, numbers of a column with the same decimals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | float | int | None

PAPER_POINTS = 182 * 72 / 25.4
"""Width of A4 without its margins, which `style.css` has, in points."""
PADDING = 2
"""Of a cell on paper, in characters."""
NOTHING = "\N{EN DASH}"
# Numbers that come as text: "25%", "0.81 ± 0.02", "1,024 MiB", "0.33 (0.31 .. 0.35)", "3 of 30".
_NUMBER = re.compile(
    r"[-+\u2212\u00b1<>\u2264\u2265~\u2248]?\s?\d"
    r"(?:[\d\s.,:%()\[\]+\-\u2013\u2212\u00b1\u00d7/<>]|\bof\b|\bto\b)*(?:[A-Za-zµ/]{1,8})?"
)


@dataclass(frozen=True)
class Table:
    """A table. Columns of numbers are aligned to the right by themselves.

    Attributes:
        columns: Names of the columns.
        rows: Cells, as many in each row as there are columns. Floats get as many decimals as
            suit their column; None and NaN are shown as a dash. A cell that is text stays as it is.
        caption: Line above the table.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells for {len(self.columns)} columns: {row}")


@dataclass(frozen=True)
class ShownColumn:
    """Name of a column and whether it holds numbers."""

    name: str
    is_number: bool


@dataclass(frozen=True)
class ShownTable:
    """A table whose cells are text.

    Attributes:
        columns: The columns.
        rows: The cells.
        caption: Line above the table; may be empty.
        label: Its name for screen readers.
        print_points: Font size in points with which it fits on paper, which does not scroll.
    """

    columns: tuple[ShownColumn, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    label: str
    print_points: float


def shown(table: Table, label: str) -> ShownTable:
    """The table as a page shows it.

    Args:
        table: The table.
        label: Its name where it has no caption.
    """
    cells = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    columns = tuple(
        ShownColumn(name, _is_number(column))
        for name, column in zip(table.columns, cells, strict=True)
    )
    texts = [_texts(column) for column in cells]
    rows = tuple(tuple(text[row] for text in texts) for row in range(len(table.rows)))
    return ShownTable(
        columns, rows, table.caption, table.caption or label, _print_points(columns, texts)
    )


def _print_points(columns: Sequence[ShownColumn], texts: Sequence[Sequence[str]]) -> float:
    """Font size with which what cannot be broken, numbers and words, fits on a page."""
    width = 0
    for column, cells in zip(columns, texts, strict=True):
        pieces = column.name.split()
        for cell in cells:
            pieces += [cell] if column.is_number else cell.split()
        width += max(map(len, pieces), default=0) + PADDING
    return round(max(4.0, min(8.5, PAPER_POINTS / (0.72 * max(width, 1)))), 1)


def _texts(column: Sequence[Cell]) -> list[str]:
    floats = [abs(cell) for cell in column if isinstance(cell, float) and math.isfinite(cell)]
    largest = max(floats, default=0.0)
    # Three digits of the largest: more are noise in nearly everything that is measured here.
    decimals = 3 if largest < 10 else 2 if largest < 100 else 1 if largest < 1000 else 0
    texts = []
    for cell in column:
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            texts.append(NOTHING)
        elif isinstance(cell, bool):
            texts.append("yes" if cell else "no")
        elif isinstance(cell, int):
            texts.append(f"{cell:,}")
        elif isinstance(cell, float):
            texts.append(f"{cell:,.{decimals}f}")
        else:
            texts.append(cell)
    return texts


def _is_number(column: Sequence[Cell]) -> bool:
    filled = [cell for cell in column if cell not in (None, "", NOTHING)]
    return bool(filled) and all(
        not isinstance(cell, bool)
        and (not isinstance(cell, str) or _NUMBER.fullmatch(cell.strip()) is not None)
        for cell in filled
    )
