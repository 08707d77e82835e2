"""`kvsieve calibrate`: where each pruning method should select in a model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvsieve.cli import options
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import parse_share


def calibrate(
    model: str = typer.Argument(help="Model folder or name, as Transformers takes it."),
    kept: Annotated[
        str,
        typer.Option(help="Share of a prompt that the server will keep. Layers depend on it."),
    ] = "25%",
    out: Annotated[Path, typer.Option(help="File to write, for prune_calibration.")] = Path(
        "kvsieve-calibration.json"
    ),
    prompts: Annotated[int, typer.Option(help="Prompts to measure.", min=1)] = 6,
    tokens: Annotated[int, typer.Option(help="Their length on average, in tokens.", min=1)] = 1500,
    max_layer: Annotated[
        int | None,
        typer.Option(help="The deepest layer that is tried. Default: two thirds of the depth."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            help="Try every so many layers; 1 tries all. Default: about ten layers.", min=1
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to run the model: auto, cpu, cuda, cuda:1, ...")
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the file's content instead of tables.")
    ] = False,
) -> None:
    """Find the layers and the threshold with which a model's prompts are pruned.

    Runs prompts of several kinds through the model with Transformers (float32 on a CPU, else the
    model's own type), each once whole and then, from one layer after the other, with its kept
    tokens only. From the curves it takes where each method selects, and writes that to a file for
    the setting `prune_calibration`.
    """
    options.check_model(model)
    try:
        kept_share = parse_share(kept)
    except ValueError as error:
        raise ConfigError([f"--kept: {error}"]) from None
    from transformers.utils import logging as transformers_logging

    from kvsieve.calibrate.run import CalibrateSettings, calibrate_model
    from kvsieve.calibrate.tables import curves_table, methods_table, prompts_table
    from kvsieve.reports.files import check_report_files, write_report
    from kvsieve.reports.provenance import provenance
    from kvsieve.reports.terminal import output_console, print_table

    check_report_files(None, out)
    transformers_logging.disable_progress_bar()
    source = provenance()
    settings = CalibrateSettings(kept_share, prompts, tokens, max_layer, every, device)
    found = calibrate_model(model, settings, console=Console(stderr=True))
    found = found.model_copy(update={"provenance": source})
    write_report(None, out, page="", data=found.as_facts())
    if as_json:
        print(json.dumps(found.as_facts(), indent=2))
        return
    console = output_console()
    for table in (curves_table(found), prompts_table(found), methods_table(found)):
        print_table(console, table)
    console.print(
        f"Written to {out}. The layers hold for about this share of kept tokens:",
        highlight=False,
        soft_wrap=True,
    )
    words = ["kvsieve", "serve", model, "--budget", kept, "--prune", "asl"]
    line = shlex.join([*words, "--prune-calibration", str(out)])
    console.print(Text(line, style="bold"), soft_wrap=True)
