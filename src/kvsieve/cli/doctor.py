"""`kvsieve doctor`: can kvsieve run here, and if not, why."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, platform and every vLLM symbol that kvsieve relies on.

    Exit status 1 if something would keep kvsieve from running.
    """
    from kvsieve.engine.doctor import examine

    with Console(stderr=True).status("looking at vLLM"):
        facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
        raise typer.Exit(1 if facts["problems"] else 0)
    console = Console()
    table = Table("what", "found", title="kvsieve doctor", title_justify="left")
    for name, version in facts["versions"].items():
        table.add_row(name, version or "[dim]not installed[/dim]")
    for section in ("plugin", "platform"):
        for name, value in facts[section].items():
            table.add_row(f"{section}: {name.replace('_', ' ')}", _words(value))
    found = sum(symbol["found"] for symbol in facts["symbols"])
    table.add_row("vLLM symbols", f"{found} of {len(facts['symbols'])} found")
    console.print(table)
    for problem in facts["problems"]:
        console.print(f"[red]problem:[/red] {problem}", highlight=False, soft_wrap=True)
    if facts["problems"]:
        raise typer.Exit(1)
    console.print("[green]kvsieve can run here[/green]")


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
