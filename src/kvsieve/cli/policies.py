"""`kvsieve policies`: the methods that rank the tokens of a prompt, and those that prune it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsieve.cli.prune_methods import prune_facts, prune_table
from kvsieve.core.errors import ConfigError
from kvsieve.policies import Method, find_method, method_names


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the policies: what they keep, where they come from, their own default settings.

    And the methods that prune a prompt while it is read.
    """
    methods: list[Method] = []
    reasons: list[str] = []
    for name in method_names():
        try:
            methods.append(find_method(name))
        except ConfigError as error:
            # A package that is broken must not hide all the others.
            reasons.extend(error.reasons)
    if as_json:
        listed = {"policies": [_facts(method) for method in methods], "pruning": prune_facts()}
        print(json.dumps(listed, indent=2))
    else:
        console = Console()
        console.print(_table(methods))
        console.print(prune_table())
    for reason in reasons:
        note = Text.assemble(("left out: ", "yellow"), reason)
        Console(stderr=True, soft_wrap=True).print(note)


def _facts(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "source": method.source,
        "sees_question": method.sees_question,
        "defaults": dict(method.defaults),
        "options": dict(method.options),
    }


def _table(methods: Iterable[Method]) -> Table:
    table = Table(
        show_lines=True,
        caption="query: whether what is kept depends on the prompt's last queries",
        caption_justify="left",
    )
    table.add_column("policy")
    table.add_column("what it keeps")
    table.add_column("query")
    table.add_column("its own defaults", overflow="fold", min_width=22)
    for method in methods:
        options = {f"policy_options.{name}": value for name, value in method.options.items()}
        settings = {**method.defaults, **options}
        cells = (
            method.name,
            f"{method.summary}\n{method.source}",
            "yes" if method.sees_question else "no",
            "\n".join(f"{name} {value}" for name, value in settings.items()),
        )
        # Text, because Rich would read brackets in a package's words as its own.
        table.add_row(*map(Text, cells))
    return table
