"""Inspect a model with the user's prompts: load, read each prompt once, look, recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.inspect.activations import MassiveRule, TokenActivations, outstanding_tokens
from kvsieve.inspect.forward import Survey, survey
from kvsieve.inspect.model import LoadedModel, load_model
from kvsieve.inspect.prompt import read_prompts
from kvsieve.inspect.ranks import (
    RankSettings,
    Stability,
    calibrated_l_min,
    resolve_layers,
    stability,
)
from kvsieve.inspect.reading import Probe, Reading, read_prompt
from kvsieve.inspect.recommend import Bounds, Recommendation, budget_grid, loss_curves, recommend
from kvsieve.inspect.sliced import scratch_bytes, slice_bytes_for
from kvsieve.policies import policy_from_config

BLOCK_SIZE = 32
"""The block size that kvsieve sets on CPUs, in tokens."""
NUM_SAMPLED = 256
SHOWN_TOKENS = 10
"""Tokens with outstanding activations that are shown."""


@dataclass(frozen=True)
class InspectSettings:
    """What to look for.

    Attributes:
        config: Settings of the sieve; its budget and full layers are what is looked for.
        bounds: The loss that is accepted.
        ranks: ASL's parameters.
        massive: When an activation counts as massive.
        block_size: Block size of the cache manager, in tokens.
        num_sampled: Queries that stand for all queries of a prompt.
        chat: Whether to wrap prompts in the model's chat template.
        device: "auto", or a name as torch takes it.
    """

    config: SieveConfig = field(default_factory=SieveConfig)
    bounds: Bounds = field(default_factory=lambda: Bounds(mean=0.02))
    ranks: RankSettings = field(default_factory=RankSettings)
    massive: MassiveRule = field(default_factory=MassiveRule)
    block_size: int = BLOCK_SIZE
    num_sampled: int = NUM_SAMPLED
    chat: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class PromptFindings:
    """What was found with one prompt.

    Attributes:
        reading: What the pass told.
        tokens: Tokens with outstanding activations.
        stability: Rank stability across layers.
    """

    reading: Reading
    tokens: tuple[TokenActivations, ...]
    stability: Stability


@dataclass(frozen=True)
class Inspection:
    """Everything that was found.

    Attributes:
        model: The folder or name that was given.
        settings: What was looked for.
        dtype: Type in which the model ran.
        device: Where it ran.
        survey: The model's layers.
        prompts: The findings, one per prompt.
        calibrated_l_min: ASL's `l_min` for these prompts: the layer where their rank variance
            peaks.
        budgets: Budgets that were tried, in tokens.
        recommendation: The plan.
        curves: Mean loss against budget for some choices of full layers.
        scratch_bytes: Memory that the pass took beyond the model's own, at most.
    """

    model: str
    settings: InspectSettings
    dtype: str
    device: str
    survey: Survey
    prompts: tuple[PromptFindings, ...]
    calibrated_l_min: int
    budgets: tuple[int, ...]
    recommendation: Recommendation
    curves: dict[str, list[float]]
    scratch_bytes: int


def inspect_model(
    model: str, prompt_files: Sequence[Path], settings: InspectSettings, *, console: Console
) -> Inspection:
    """Inspect a model with prompts.

    Args:
        model: Folder or name, as Transformers takes it.
        prompt_files: UTF-8 text files, one prompt each; at least one.
        settings: What to look for.
        console: Where progress is shown; a console on stderr.

    Raises:
        ConfigError: The model, a prompt or a setting cannot be used, with every reason.
        KvsieveError: The model's numbers are not finite.
    """
    _check(settings)
    with console.status(f"loading {model}"):
        loaded = load_model(model, settings.device)
    return inspect_loaded(loaded, prompt_files, settings, console=console)


def inspect_loaded(
    loaded: LoadedModel,
    prompt_files: Sequence[Path],
    settings: InspectSettings,
    *,
    console: Console,
) -> Inspection:
    """As `inspect_model`, with a model that is loaded."""
    policy = policy_from_config(settings.config)
    prompts = read_prompts(
        list(prompt_files),
        loaded.tokenizer,
        chat=settings.chat,
        window=policy.observation_window,
        max_tokens=loaded.max_tokens,
    )
    longest = max((prompt.token_ids for prompt in prompts), key=len)
    seen = survey(loaded, list(longest))
    resolve_layers(settings.ranks, seen.layers)
    budgets = budget_grid(len(longest), settings.config, settings.block_size)
    probe = Probe(
        policy=policy,
        budgets=budgets,
        block_size=settings.block_size,
        pool_size=settings.ranks.pool_size,
        massive=settings.massive,
        num_sampled=settings.num_sampled,
    )
    findings = []
    for prompt in prompts:
        with console.status(f"reading {prompt.name}: {len(prompt.token_ids):,} tokens"):
            reading = read_prompt(loaded, prompt, probe)
        findings.append(
            PromptFindings(
                reading=reading,
                tokens=outstanding_tokens(reading.activations, SHOWN_TOKENS),
                stability=stability(
                    torch.stack(reading.ranks),
                    seen.layers,
                    settings.ranks,
                    policy.observation_window,
                ),
            )
        )
    losses = [one.reading.losses for one in findings]
    recommendation = recommend(
        losses,
        seen.layers,
        seen.untouched,
        budgets,
        settings.bounds,
        block_size=settings.block_size,
        page_bytes=settings.block_size * seen.cached_numbers * loaded.dtype.itemsize,
    )
    best = recommendation.best
    return Inspection(
        model=loaded.name,
        settings=settings,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        survey=seen,
        prompts=tuple(findings),
        calibrated_l_min=calibrated_l_min([one.stability for one in findings]),
        budgets=budgets,
        recommendation=recommendation,
        curves=loss_curves(losses, seen.layers, best.plan.full if best else None),
        scratch_bytes=scratch_bytes(
            seen.num_heads,
            seen.num_kv_heads,
            seen.cached_numbers // (2 * seen.num_kv_heads),
            len(longest),
            slice_bytes_for(loaded.device),
        ),
    )


def _check(settings: InspectSettings) -> None:
    """Settings that cannot work, before anything is loaded.

    Raises:
        ConfigError: Every reason.
    """
    ranks, bounds, massive = settings.ranks, settings.bounds, settings.massive
    window = settings.config.observation_window
    reasons = []
    if not 0 <= bounds.mean < 1:
        reasons.append(f"loss is a share of the attention and must be in [0, 1), got {bounds.mean}")
    if bounds.worst is not None and not 0 <= bounds.worst <= 1:
        reasons.append(
            f"worst_loss is a share of the attention and must be in [0, 1], got {bounds.worst}"
        )
    if not ranks.tau > 0:
        reasons.append(f"tau must be above 0, got {ranks.tau}")
    if ranks.pool_size < 1 or ranks.pool_size % 2 == 0:
        reasons.append(f"asl_pool_size must be odd and positive, got {ranks.pool_size}")
    if ranks.select_k is not None and ranks.select_k <= window:
        reasons.append(
            f"select_k counts the window too, so it must be above {window}"
            f" (observation_window), got {ranks.select_k}"
        )
    if massive.min_magnitude < 0 or massive.min_ratio < 0:
        reasons.append("the bounds on massive activations cannot be negative")
    if settings.num_sampled < 1:
        reasons.append(f"sampled_queries must be at least 1, got {settings.num_sampled}")
    if reasons:
        raise ConfigError(reasons)
