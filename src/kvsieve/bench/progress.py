"""What is seen on stderr while a benchmark runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvsieve.bench.schema import ArmRun


@contextmanager
def bar(console: Console, label: str, requests: int) -> Iterator[Callable[[], None]]:
    """A bar of answered requests while the block runs; yields what moves it by one.

    Args:
        console: A console on stderr.
        label: What is running.
        requests: How many answers will come.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # A file would get an empty line for each bar.
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=requests)
        yield lambda: progress.advance(task)


def line(label: str, arm: str, run: ArmRun) -> str:
    """One line on a run that is finished."""
    sieved = f", {run.sieve.sieved}/{run.sieve.requests} sieved" if run.sieve else ""
    return (
        f"{label}, {arm}: {run.output_tokens_per_s:.4g} output tokens/s, TTFT p50"
        f" {run.ttft.p50:.3g} s, TPOT p50 {run.tpot.p50 * 1e3:.3g} ms, at most"
        f" {run.running_max:.0f} running{sieved}"
    )
