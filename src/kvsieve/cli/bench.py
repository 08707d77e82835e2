"""`kvsieve bench`: what a budget saves, against stock vLLM in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvsieve.cli import options
from kvsieve.core.errors import ConfigError

_LOAD, _SERVERS, _SWEEP = "Load", "Servers", "Sweep"


def bench(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Model to serve, as `vllm serve` takes it.")
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(
            help="Budgets to compare with stock, separated by commas: tokens, or shares such as"
            " 25%. One server each.",
            rich_help_panel="Sieve",
        ),
    ] = "1024",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy of the sieved servers, or several separated by commas.",
            rich_help_panel="Sieve",
            show_default=False,
        ),
    ] = None,
    min_budget: options.MinBudget = None,
    max_budget: options.MaxBudget = None,
    mode: options.Mode = None,
    full_layers: options.FullLayers = None,
    observation_window: options.ObservationWindow = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_recent_tokens: options.NumRecentTokens = None,
    num_sink_tokens: options.NumSinkTokens = None,
    layer_budgets: options.LayerBudgets = None,
    max_tiers: options.MaxTiers = None,
    policy_options: options.PolicyOptions = None,
    protect_roles: options.ProtectRoles = None,
    prune: options.Prune = None,
    prune_options: options.PruneOptions = None,
    prune_calibration: options.PruneCalibration = None,
    workload: Annotated[
        str,
        typer.Option(
            help="Workloads, separated by commas: long-prompt (4,000 in, 500 out), long-output"
            " (500 in, 2,000 out), shared-prefix (2,000 tokens in common), mixed (log-normal"
            " lengths), multi-turn (chats of 5 turns).",
            rich_help_panel=_LOAD,
        ),
    ] = "long-prompt",
    scale: Annotated[
        float,
        typer.Option(help="Multiplies all lengths; 0.1 suits a CPU.", rich_help_panel=_LOAD),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: this many clients, each sending its next request when it has its"
            " answer. Default: 8.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop instead: requests per second, Poisson arrivals.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of a run; each turn of a chat is one. Default: 4 for each client (each"
            " turn), or 32 in an open loop.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            help="How often every server runs under every workload, in alternating order; from 5"
            " on, intervals are shown.",
            rich_help_panel=_LOAD,
        ),
    ] = 3,
    seed: Annotated[
        int,
        typer.Option(help="Decides lengths, words and arrivals.", rich_help_panel=_LOAD),
    ] = 0,
    ttft_goal: Annotated[
        float | None,
        typer.Option(
            help="Goodput: longest time to first token, in seconds.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    tpot_goal: Annotated[
        float | None,
        typer.Option(
            help="Goodput: longest time per output token, in seconds.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Also find the highest concurrency that keeps --ttft-p50, for each server"
            " (--repeats 0: only that).",
            rich_help_panel=_SWEEP,
        ),
    ] = False,
    ttft_p50: Annotated[
        float | None,
        typer.Option(
            help="Bound of the sweep on the median time to first token, in seconds.",
            rich_help_panel=_SWEEP,
            show_default=False,
        ),
    ] = None,
    sweep_limit: Annotated[
        int, typer.Option(help="Highest concurrency to try.", rich_help_panel=_SWEEP)
    ] = 64,
    one_at_a_time: Annotated[
        bool | None,
        typer.Option(
            "--one-at-a-time/--all-at-once",
            help="Start a server for each run, or keep all alive and load one at a time. Default:"
            " all at once on a CPU, one at a time on a GPU.",
            rich_help_panel=_SERVERS,
            show_default=False,
        ),
    ] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            help="KV cache of each server, in GiB; needed where all are alive at once.",
            min=0.001,
            max=1e6,
            rich_help_panel=_SERVERS,
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write everything measured to this file."),
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a report with figures to this file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Measure nothing: show two earlier JSON results side by side.",
            metavar="A.json B.json",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare stock vLLM with a sieved KV cache under load, over HTTP.

    Starts a stock server and one for each budget, and sends all of them the same requests
    in alternating order; reports ratios of pairs. Every other option, and whatever stands
    after `--`, is a flag of `vllm serve`, the same for all servers.

    Example: kvsieve bench MODEL --budgets 128,256 --scale 0.1 --concurrency 4
    --kv-cache-gib 0.25 --dtype float32 --enforce-eager --block-size 32 --max-model-len 4096
    """
    if compare is not None:
        _compare(compare, [*([model] if model else []), *context.args])
        return
    if model is None:
        raise typer.BadParameter("give the MODEL to serve, or --compare A.json B.json")
    problems: list[str] = []
    if model.startswith("--"):
        problems.append(f"the model comes first, and then the flags of vLLM (given: {model!r})")
    try:
        options.check_model(model)
    except ConfigError as error:
        problems += error.reasons
    from kvsieve.bench.choices import Choices, choose, visible_gpus

    given = Choices(
        model=model,
        budgets=budgets,
        policies=policy,
        settings=_settings(context),
        workloads=workload,
        scale=scale,
        concurrency=concurrency,
        rate=rate,
        requests=requests,
        repeats=repeats,
        seed=seed,
        ttft_goal=ttft_goal,
        tpot_goal=tpot_goal,
        sweep=sweep,
        ttft_p50=ttft_p50,
        sweep_limit=sweep_limit,
        one_at_a_time=one_at_a_time,
        kv_cache_gib=kv_cache_gib,
        json_file=json_file,
        html_file=html_file,
        flags=tuple(context.args),
    )
    parameters = context.command.params
    own = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    try:
        chosen = choose(given, num_gpus=visible_gpus(), own_options=own)
    except ConfigError as error:
        raise ConfigError([*problems, *error.reasons]) from None
    if problems:
        raise ConfigError(problems)
    _run(chosen)


def _settings(context: typer.Context) -> dict[str, Any]:
    """The sieve's settings that all sieved servers have in common."""
    settings = options.given_settings(context)
    # Each server has its own of these.
    return {name: value for name, value in settings.items() if name not in ("policy", "budget")}


def _run(chosen: Any) -> None:
    from kvsieve.bench.page import render
    from kvsieve.bench.run import run_bench
    from kvsieve.bench.schema import BenchResult
    from kvsieve.bench.screen import print_result
    from kvsieve.bench.sentences import sentences
    from kvsieve.reports.page import write_report
    from kvsieve.reports.terminal import output_console

    def keep(result: BenchResult) -> None:
        write_report(None, chosen.json_file, page="", data=result.model_dump(mode="json"))

    errors = Console(stderr=True)
    result = run_bench(chosen, errors, keep)
    keep(result)
    console = output_console()
    print_result(console, result)
    for sentence in sentences(result):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    if chosen.html_file is not None:
        write_report(
            chosen.html_file, None, page=render(result), data=result.model_dump(mode="json")
        )
    for file in (chosen.json_file, chosen.html_file):
        if file is not None:
            errors.print(f"written: {file}", highlight=False, soft_wrap=True, markup=False)


def _compare(files: tuple[Path, Path], others: list[str]) -> None:
    if others:
        raise typer.BadParameter(f"--compare measures nothing; leave out {' '.join(others)}")
    from kvsieve.bench.compare import compare, load_result
    from kvsieve.reports.terminal import output_console, print_table

    a, b = (load_result(file) for file in files)
    found = compare(a, b)
    console = output_console()
    console.print(f"A: {files[0]}\nB: {files[1]}", highlight=False, soft_wrap=True, markup=False)
    for kind, said in (("differs", found.differences), ("not compared", found.refused)):
        for sentence in said:
            console.print(f"{kind}: {sentence}", highlight=False, soft_wrap=True, markup=False)
    for table in found.tables:
        print_table(console, table)
