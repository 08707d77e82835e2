"""`kvsieve plan`: what a budget would cost and save, without loading the model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvsieve.cli import options
from kvsieve.core.notation import layer_list


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
    policy_options: options.PolicyOptions = None,
    budget: options.Budget = None,
    min_budget: options.MinBudget = None,
    max_budget: options.MaxBudget = None,
    layer_budgets: options.LayerBudgets = None,
    max_tiers: options.MaxTiers = None,
    full_layers: options.FullLayers = None,
    observation_window: options.ObservationWindow = None,
    num_recent_tokens: options.NumRecentTokens = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_sink_tokens: options.NumSinkTokens = None,
    prune: options.Prune = None,
    prune_options: options.PruneOptions = None,
    prune_calibration: options.PruneCalibration = None,
) -> None:
    """Show layers, cache groups, padding, bytes per request and requests that fit."""
    options.check_model(model)
    config = options.check_settings(options.given_settings(context))
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


def _tiers(facts: dict[str, Any]) -> Table:
    """The tiers of a plan, a row each."""
    headings = ("layers", "nominal per layer", "nominal", "stored", "groups", "MiB at the end")
    table = Table(*headings, title="Tiers of the sieved layers", title_justify="left")
    for tier in facts["tiers"]:
        nominal = tier["nominal_per_layer"]
        if len(set(nominal)) == 1:
            nominal = nominal[:1]
        table.add_row(
            layer_list(tier["layers"]),
            ", ".join(map(str, nominal)),
            str(tier["nominal"]),
            str(tier["stored"]),
            str(tier["groups"]),
            f"{tier['bytes'] / 2**20:.1f}",
        )
    return table


def _pruning(facts: dict[str, Any]) -> Table:
    """What pruning would do to a prompt."""
    pruning, prompt_tokens = facts["pruning"], facts["prompt_tokens"]
    table = Table(show_header=False, title="Pruning while a prompt is read", title_justify="left")
    passes = ", in two passes" if pruning["passes"] == 2 else ""
    table.add_row("method", f"{pruning['method']}{passes}")
    table.add_row(
        "scored by", f"window {pruning['window']}, {pruning['pooling']} {pruning['pool_size']}"
    )
    table.add_row("pruned are", pruning["rule"])
    if not pruning["is_pruned"]:
        table.add_row("not this one", pruning["not_pruned"])
        return table
    first, last = pruning["layers"]["first"], pruning["layers"]["last"]
    if pruning["first_judged_layer"] is None:
        table.add_row("pruned after layer", str(first))
    else:
        otherwise = "; or not at all" if pruning["may_stay_whole"] else ""
        table.add_row("first judged layer", str(pruning["first_judged_layer"]))
        table.add_row("pruned after layer", f"{first} to {last}, for each prompt{otherwise}")
    table.add_row("tokens that go on", f"{pruning['kept_tokens']} of {prompt_tokens}")
    table.add_row("must be read at once", f"{pruning['read_at_once']} tokens")
    work = pruning["token_layers"]
    least, most = (100 * work[key] / work["full"] for key in ("least", "most"))
    share = f"{least:.1f}%" if least == most else f"{least:.1f}% to {most:.1f}%"
    table.add_row("computed, of tokens x layers", share)
    return table


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
        f" {facts['prompt_tokens']} (block size {facts['block_size']})"
        + (f"; {budget['shape']}, the mean over the layers" if len(facts["tiers"]) > 1 else ""),
    )
    table.add_row("cached numbers", f"{facts['kv_bytes']} bytes each (--kv-bytes)")
    table.add_row(
        "cache groups",
        f"{groups['count']} of {groups['layers_each']} layers,"
        f" {groups['padding_percent']:.1f}% padding",
    )
    console.print(table)
    if len(facts["tiers"]) > 1:
        console.print(_tiers(facts))
    if facts["pruning"] is not None:
        console.print(_pruning(facts))
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
