"""`kvsieve inspect`: what a model attends to in a prompt, and the plan that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvsieve.cli import options

_ASL = "Rank stability (ASL)"
_MASSIVE = "Massive activations"


def inspect(
    context: typer.Context,
    model: str = typer.Argument(help="Model folder or name, as Transformers takes it."),
    prompt_file: Annotated[
        list[Path],
        typer.Option(
            help="UTF-8 text file that holds a prompt. May be given several times: the plan then"
            " holds for all of them."
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    chat: Annotated[
        bool, typer.Option(help="Wrap each prompt in the model's chat template.")
    ] = False,
    loss: Annotated[
        float,
        typer.Option(
            help="Attention mass that the plan may lose, as a share: mean over the sieved layers."
        ),
    ] = 0.02,
    worst_loss: Annotated[
        float | None,
        typer.Option(help="The same for the worst sieved layer. Default: three times --loss."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Block size of the KV cache, in tokens.", min=1)
    ] = 32,
    device: Annotated[
        str, typer.Option(help="Where to run the model: auto, cpu, cuda, cuda:1, ...")
    ] = "auto",
    sampled_queries: Annotated[
        int,
        typer.Option(help="Queries, evenly spread, that stand for all of the prompt's."),
    ] = 256,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to, as JSON.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="File to write a page with figures to.")
    ] = None,
    l_min: Annotated[
        int | None,
        typer.Option(
            help="First layer at which the rank variance is judged. Default: 10 of 32, scaled to"
            " the model's depth; it belongs at the variance peak, which the output shows.",
            rich_help_panel=_ASL,
        ),
    ] = None,
    l_obs: Annotated[
        int | None,
        typer.Option(
            help="Layers over which ranks are compared. Default: 8 of 32, scaled.",
            rich_help_panel=_ASL,
        ),
    ] = None,
    tau: Annotated[
        float,
        typer.Option(
            help="A layer is picked where the variance is below this share of that at --l-min.",
            rich_help_panel=_ASL,
        ),
    ] = 0.3,
    select_k: Annotated[
        int | None,
        typer.Option(
            help="Tokens that would be kept, the window included. Default: 5% of the prompt.",
            rich_help_panel=_ASL,
        ),
    ] = None,
    asl_pool_size: Annotated[
        int,
        typer.Option(help="Width of the average pooling, in tokens; odd.", rich_help_panel=_ASL),
    ] = 7,
    massive_magnitude: Annotated[
        float,
        typer.Option(
            help="An activation is massive above this magnitude, if also:",
            rich_help_panel=_MASSIVE,
        ),
    ] = 100.0,
    massive_ratio: Annotated[
        float,
        typer.Option(
            help="at least this many times the median magnitude of its hidden state.",
            rich_help_panel=_MASSIVE,
        ),
    ] = 1000.0,
    policy: options.Policy = None,
    policy_options: options.PolicyOptions = None,
    observation_window: options.ObservationWindow = None,
    num_recent_tokens: options.NumRecentTokens = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_sink_tokens: options.NumSinkTokens = None,
) -> None:
    """Show what a model attends to in your prompts, and recommend a plan for a loss you name.

    Runs each prompt through the model once, with Transformers (float32 on a CPU, else the model's
    own type), and shows how few tokens hold the attention in each layer, which tokens carry
    massive activations, how stable the ranks of tokens are from layer to layer, and the
    `kvsieve serve` line that holds the least KV memory within the loss.
    """
    if not prompt_file:
        raise typer.BadParameter("give at least one --prompt-file")
    options.check_model(model)
    from kvsieve.policies import parse_settings

    config = parse_settings(options.given_settings(context))
    from transformers.utils import logging as transformers_logging

    from kvsieve.inspect.activations import MassiveRule
    from kvsieve.inspect.facts import as_facts
    from kvsieve.inspect.page import inspection_page, print_inspection
    from kvsieve.inspect.ranks import RankSettings
    from kvsieve.inspect.recommend import Bounds
    from kvsieve.inspect.run import InspectSettings, inspect_model
    from kvsieve.reports.page import check_report_files, write_report
    from kvsieve.reports.provenance import provenance
    from kvsieve.reports.terminal import output_console

    check_report_files(html_path, json_path)
    transformers_logging.disable_progress_bar()
    source = provenance()
    settings = InspectSettings(
        config=config,
        bounds=Bounds(mean=loss, worst=min(1.0, 3 * loss) if worst_loss is None else worst_loss),
        ranks=RankSettings(l_min, l_obs, tau, select_k, asl_pool_size),
        massive=MassiveRule(massive_magnitude, massive_ratio),
        block_size=block_size,
        num_sampled=sampled_queries,
        chat=chat,
        device=device,
    )
    found = inspect_model(model, prompt_file, settings, console=Console(stderr=True))
    print_inspection(output_console(), found)
    if html_path is not None or json_path is not None:
        write_report(
            html_path,
            json_path,
            page=inspection_page(found, source) if html_path is not None else "",
            data={**as_facts(found), "provenance": source},
        )
