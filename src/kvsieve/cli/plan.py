"""`kvsieve plan`: what a budget would cost and save, without loading the model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvsieve.cli import options
from kvsieve.core.config import SieveConfig, layer_list


def plan(
    context: typer.Context,
    model: str = typer.Argument(help="Model folder or name; only its config.json is read."),
    prompt_tokens: Annotated[
        int, typer.Option(help="Prompt length to plan for, in tokens.", min=1)
    ] = 4000,
    output_tokens: Annotated[
        int, typer.Option(help="Answer length to plan for, in tokens.", min=0)
    ] = 500,
    block_size: Annotated[
        int, typer.Option(help="Block size of the KV cache, in tokens.", min=1)
    ] = 32,
    kv_cache_gib: Annotated[
        float, typer.Option(help="Memory for the KV cache, in GiB.", min=0.001, max=1e6)
    ] = 4.0,
    kv_bytes: Annotated[
        int, typer.Option(help="Bytes per cached number (2 for bfloat16).", min=1, max=4)
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    policy: options.Policy = None,
    budget: options.Budget = None,
    min_budget: options.MinBudget = None,
    max_budget: options.MaxBudget = None,
    full_layers: options.FullLayers = None,
    observation_window: options.ObservationWindow = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_sink_tokens: options.NumSinkTokens = None,
) -> None:
    """Show layers, cache groups, padding, bytes per request and requests that fit."""
    options.check_model(model)
    config = SieveConfig.parse(options.given_settings(context))
    from kvsieve.planning.plan import plan_model

    facts = plan_model(
        model,
        config,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_size=block_size,
        pool_bytes=int(kv_cache_gib * 2**30),
        kv_bytes=kv_bytes,
    )
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(Console(), facts)


def _print(console: Console, facts: dict[str, Any]) -> None:
    layers, budget, groups = facts["layers"], facts["budget"], facts["groups"]
    table = Table(show_header=False, title=f"Plan for {facts['model']}", title_justify="left")
    table.add_row("full layers", layer_list(layers["full"]))
    table.add_row("sieved layers", layer_list(layers["sieved"]))
    if layers["untouched"]:
        table.add_row("untouched layers", layer_list(layers["untouched"]))
    table.add_row(
        "budget",
        f"{budget['nominal']} tokens nominal, {budget['stored']} stored of"
        f" {facts['prompt_tokens']} (block size {facts['block_size']})",
    )
    table.add_row("cached numbers", f"{facts['kv_bytes']} bytes each (--kv-bytes)")
    table.add_row(
        "cache groups",
        f"{groups['count']} of {groups['layers_each']} layers,"
        f" {groups['padding_percent']:.1f}% padding",
    )
    console.print(table)
    title = (
        f"A request of {facts['prompt_tokens']} prompt and {facts['output_tokens']} output tokens"
    )
    costs = Table("", "full KV", "sieved", "ratio", title=title, title_justify="left")
    for label, key in (
        ("while the prompt is read", "peak"),
        ("after the last token", "end"),
    ):
        full, sieved = facts["request"]["full"][key], facts["request"]["sieved"][key]
        costs.add_row(
            f"MiB {label}",
            f"{full / 2**20:.1f}",
            f"{sieved / 2**20:.1f}",
            f"{sieved / full:.2f}",
        )
    fit = facts["requests_that_fit"]
    costs.add_row(
        f"requests that fit in {facts['pool_bytes'] / 2**30:g} GiB",
        str(fit["full"]),
        str(fit["sieved"]),
        f"{fit['sieved'] / fit['full']:.2f}" if fit["full"] else "",
    )
    console.print(costs)
    for note in facts["notes"]:
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False, soft_wrap=True)
