"""`kvsieve generate`: one answer, offline, with proof of what the sieve did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvsieve.cli import options
from kvsieve.core.errors import KvsieveError
from kvsieve.core.report import pruning_sentence


def generate(
    context: typer.Context,
    model: str = typer.Argument(help="Model to run, as vLLM takes it."),
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File that holds the prompt; '-' for standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 128,
    chat: Annotated[
        bool, typer.Option(help="Wrap the prompt in the model's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache, as vLLM's.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context, in tokens.", show_default=False)
    ] = None,
    kv_cache_gib: Annotated[
        float, typer.Option(help="Memory for the KV cache, in GiB.", min=0.01, max=1e6)
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    policy: options.Policy = None,
    budget: options.Budget = None,
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
) -> None:
    """Generate from one prompt with a sieved KV cache, greedily, and report what was kept."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    if prompt is None:
        prompt = sys.stdin.read() if str(prompt_file) == "-" else _read(prompt_file)
    options.check_model(model)
    settings = options.given_settings(context)
    options.check_settings(settings)
    from kvsieve.engine.entrypoint import generate_once

    errors = Console(stderr=True)
    try:
        with errors.status(f"starting vLLM with {model}"):
            answer = generate_once(
                model,
                settings,
                prompt,
                chat=chat,
                max_tokens=max_tokens,
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_bytes=int(kv_cache_gib * 2**30),
            )
    except KvsieveError:
        raise
    except (ValueError, OSError) as error:
        # What vLLM refuses: an unknown model, an empty prompt, one that is too long.
        raise KvsieveError(str(error)) from None
    if as_json:
        print(json.dumps({"text": answer.text, "kvsieve": answer.report}))
        return
    print(answer.text)
    report = json.dumps(answer.report) if answer.report else "switched off by KVSIEVE_DISABLE"
    errors.print(f"kvsieve: {report}", highlight=False, soft_wrap=True)
    if answer.report and (said := pruning_sentence(answer.report)):
        errors.print(f"kvsieve: {said}", highlight=False, soft_wrap=True)


def _read(path: Path | None) -> str:
    assert path is not None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not UTF-8 text: {error.reason}") from None
