"""Tables on a terminal of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvsieve.reports.table import Table
from kvsieve.reports.terminal import WIDTH_OF_A_FILE, output_console, print_table

TABLE = Table(
    columns=("task", "score, %", "against full KV, points", "requests sieved"),
    rows=(("niah_essay", 57.25, "-12.5 (-30.0 to +5.0)", None), ("[red]x[/red]", 3.5, "", 1)),
    caption="Scores.",
)


@pytest.mark.parametrize("width", [24, 40, 80, 160])
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    shown = io.StringIO()
    print_table(Console(file=shown, width=width), TABLE)
    assert "…" not in shown.getvalue()
    if width >= 80:
        for part in ("57.25", "-12.5 (-30.0 to +5.0)", "[red]x[/red]"):
            assert part in shown.getvalue()


def test_a_table_without_rows_is_left_out() -> None:
    shown = io.StringIO()
    print_table(Console(file=shown), Table(("a",), ()))
    assert shown.getvalue() == ""


def test_a_file_is_as_wide_as_the_tables_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output_console().width == WIDTH_OF_A_FILE
    monkeypatch.setenv("COLUMNS", "90")
    assert output_console().width == 90
