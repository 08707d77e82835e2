"""Calibrate a model: load, make prompts, measure each, choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvsieve.calibrate.choose import choose
from kvsieve.calibrate.facts import measured
from kvsieve.calibrate.measure import measure_prompt, work
from kvsieve.calibrate.prompts import CalibrationPrompt, calibration_prompts
from kvsieve.calibrate.resume import check_going_on
from kvsieve.core.errors import ConfigError
from kvsieve.core.pruning import Prune
from kvsieve.evals.prompts import PromptMaker
from kvsieve.inspect.forward import survey
from kvsieve.inspect.model import LoadedModel, load_model
from kvsieve.pruning import PruneOptions, prune_settings
from kvsieve.pruning.calibration import Calibration

CANDIDATES = 10
"""About so many layers are tried by default, and the first or second besides."""


@dataclass(frozen=True)
class CalibrateSettings:
    """How to measure.

    Attributes:
        kept_share: Share of a prompt that is kept.
        num_prompts: Prompts to measure.
        mean_tokens: Their length on average, in tokens.
        max_layer: The deepest layer that is tried; None for two thirds of the depth.
        every: Distance of the layers that are tried; None for about ten of them.
        device: "auto", or a name as torch takes it.
    """

    kept_share: float = 0.25
    num_prompts: int = 6
    mean_tokens: int = 1500
    max_layer: int | None = None
    every: int | None = None
    device: str = "auto"


def calibrate_model(model: str, settings: CalibrateSettings, *, console: Console) -> Calibration:
    """Find where each method should select in a model.

    Args:
        model: Folder or name, as Transformers takes it.
        settings: How to measure.
        console: Where progress is shown; a console on stderr.

    Raises:
        ConfigError: The model or a setting cannot be used, with every reason.
        KvsieveError: The model's numbers are not finite.
    """
    _check(settings)
    with console.status(f"loading {model}"):
        loaded = load_model(model, settings.device)
    maker = PromptMaker(model, chat=bool(loaded.tokenizer.chat_template))
    prompts = calibration_prompts(maker, settings.num_prompts, settings.mean_tokens)
    return calibrate_loaded(loaded, prompts, settings, console=console)


def calibrate_loaded(
    loaded: LoadedModel,
    prompts: Sequence[CalibrationPrompt],
    settings: CalibrateSettings,
    *,
    console: Console,
) -> Calibration:
    """As `calibrate_model`, with a model that is loaded and prompts of one's own."""
    num_layers = len(loaded.layers)
    window = _check_depth(loaded)
    keeps = _num_keep(loaded, prompts, settings.kept_share, window)
    first = list(prompts[0].token_ids)
    seen = survey(loaded, first)
    if seen.layers != list(range(num_layers)):
        raise ConfigError(
            [
                f"{loaded.name} has layers without full attention ({num_layers - len(seen.layers)}"
                f" of {num_layers}), and such models cannot be pruned"
            ]
        )
    check_going_on(loaded, first)
    candidates = candidate_layers(num_layers, settings)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # A file would get an empty line for each bar.
        disable=not console.is_terminal,
    )
    each = []
    with progress:
        total = sum(
            work(len(prompt.token_ids), keep, candidates, num_layers)
            for prompt, keep in zip(prompts, keeps, strict=True)
        )
        bar = progress.add_task("calibrating", total=total)
        for prompt, keep in zip(prompts, keeps, strict=True):
            label = f"prompt {prompt.name}, {len(prompt.token_ids):,} tokens"
            progress.update(bar, description=label)
            each.append(
                measure_prompt(
                    loaded, prompt, keep, candidates, lambda done: progress.advance(bar, done)
                )
            )
            if not console.is_terminal:
                console.print(f"measured {label}", highlight=False)
    methods = choose(each, num_layers, settings.kept_share)
    return Calibration(
        model=loaded.name,
        num_layers=num_layers,
        kept_share=settings.kept_share,
        methods=methods,
        measured={
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            **measured(each, methods, num_layers, settings.kept_share),
        },
    )


def candidate_layers(num_layers: int, settings: CalibrateSettings) -> list[int]:
    """The layers that are tried, ascending; the deepest is always among them.

    Raises:
        ConfigError: The deepest is none of the layers at which prompts can be pruned.
    """
    deepest = settings.max_layer
    if deepest is None:
        deepest = min(round(2 * num_layers / 3), num_layers - 2)
    elif deepest > num_layers - 2:
        raise ConfigError(
            [
                f"max_layer must be in [0, {num_layers - 2}] ({num_layers} layers in all, and after"
                f" the last nothing is left to be saved), got {deepest}"
            ]
        )
    every = settings.every or max(1, round(deepest / CANDIDATES))
    return list(range(deepest % every, deepest + 1, every))


def _num_keep(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], kept_share: float, window: int
) -> list[int]:
    """Tokens kept of each prompt.

    Raises:
        ConfigError: A prompt is longer than the model's context, or so short that no token would
            be kept by its score.
    """
    reasons = []
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if loaded.max_tokens is not None and longest > loaded.max_tokens:
        reasons.append(
            f"the longest prompt has {longest} tokens, more than the model's {loaded.max_tokens}:"
            " give a smaller --tokens"
        )
    keeps = [math.floor(kept_share * len(prompt.token_ids)) for prompt in prompts]
    if min(keeps) <= window:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        reasons.append(
            f"{kept_share:.3g} of {shortest} tokens are {min(keeps)}, and ASL keeps the last"
            f" {window} anyway: give a larger --kept, or more --tokens"
        )
    if reasons:
        raise ConfigError(reasons)
    return keeps


def _check_depth(loaded: LoadedModel) -> int:
    """ASL's window, in tokens.

    Raises:
        ConfigError: The model has too few layers for a method.
    """
    num_layers = len(loaded.layers)
    try:
        return prune_settings(Prune("asl"), PruneOptions(), num_layers).window
    except ConfigError:
        raise ConfigError(
            [
                f"{loaded.name} has {num_layers} layers, too few to compare ranks between them and"
                " prune a prompt after that"
            ]
        ) from None


def _check(settings: CalibrateSettings) -> None:
    """Settings that cannot work, before anything is loaded.

    Raises:
        ConfigError: Every reason.
    """
    reasons = []
    if not 0 < settings.kept_share < 1:
        reasons.append(
            f"kept is a share of the prompt and must be between 0 and 1, or 0% and 100%; got"
            f" {settings.kept_share:g}"
        )
    if settings.num_prompts < 1:
        reasons.append(f"prompts must be at least 1, got {settings.num_prompts}")
    if settings.mean_tokens < 1:
        reasons.append(f"tokens must be at least 1, got {settings.mean_tokens}")
    if settings.every is not None and settings.every < 1:
        reasons.append(f"every must be at least 1, got {settings.every}")
    if settings.max_layer is not None and settings.max_layer < 0:
        reasons.append(f"max_layer must be at least 0, got {settings.max_layer}")
    if reasons:
        raise ConfigError(reasons)
