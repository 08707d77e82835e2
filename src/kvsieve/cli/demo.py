"""`kvsieve demo`: the same question about a long document, full and sieved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    budget: Annotated[
        int, typer.Option(help="Budget of the sieved run, in tokens per KV head.")
    ] = 256,
    port: Annotated[
        int | None,
        typer.Option(help="Loopback port. Default: any free one.", min=1, max=65535),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to, as JSON.")
    ] = None,
) -> None:
    """Serve a small real model twice, full and sieved, and compare the two side by side."""
    from kvsieve.demo.run import run_demo

    run_demo(Console(), budget=budget, port=port, json_path=json_path)
