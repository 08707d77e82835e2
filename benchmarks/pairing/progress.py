"""Lines of progress with the time since the start."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console


def clocked(console: Console, began: float) -> Callable[[str], None]:
    """A function that prints a line behind the minutes and seconds since `began`.

    Args:
        console: Where to print.
        began: `time.monotonic()` at the start.
    """

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        console.print(f"[{minutes:3d}:{seconds:02d}] {line}", markup=False, soft_wrap=True)

    return say
