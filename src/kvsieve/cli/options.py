"""Command-line options for the sieve's settings, one per field of `SieveConfig`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import read_json

_PANEL = "Sieve"


def _option(field: str, form: str = "") -> Any:
    settings = SieveConfig.model_fields[field]
    assert settings.description is not None
    has_default = not settings.is_required() and settings.default_factory is None
    shown = (
        f" Default: {settings.default}."
        if has_default and settings.default not in (None, ())
        else ""
    )
    return typer.Option(
        help=settings.description + form + shown, rich_help_panel=_PANEL, show_default=False
    )


Policy = Annotated[str | None, _option("policy")]
PolicyOptions = Annotated[str | None, _option("policy_options", " As JSON.")]
Budget = Annotated[str | None, _option("budget")]
MinBudget = Annotated[int | None, _option("min_budget")]
MaxBudget = Annotated[int | None, _option("max_budget")]
Mode = Annotated[str | None, _option("mode")]
ModeEndpoint = Annotated[bool | None, _option("mode_endpoint")]
ForcedTokens = Annotated[bool | None, _option("forced_tokens")]
LayerBudgets = Annotated[str | None, _option("layer_budgets")]
MaxTiers = Annotated[int | None, _option("max_tiers")]
FullLayers = Annotated[str | None, _option("full_layers")]
ObservationWindow = Annotated[int | None, _option("observation_window")]
NumRecentTokens = Annotated[int | None, _option("num_recent_tokens")]
PoolSize = Annotated[int | None, _option("pool_size")]
Pooling = Annotated[str | None, _option("pooling")]
NumSinkTokens = Annotated[int | None, _option("num_sink_tokens")]
ProtectRoles = Annotated[str | None, _option("protect_roles")]
Prune = Annotated[str | None, _option("prune")]
PruneOptions = Annotated[str | None, _option("prune_options", " As JSON.")]
PruneCalibration = Annotated[str | None, _option("prune_calibration")]


def check_model(model: str) -> None:
    """Say so if the model is a path that does not exist.

    vLLM and Transformers would take it for a name on the Hugging Face hub.

    Raises:
        ConfigError: The folder does not exist.
    """
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise ConfigError([f"there is no folder {model}"])


def given_settings(context: typer.Context) -> dict[str, Any]:
    """The settings of the sieve that were given on the command line, by field name.

    Raises:
        ConfigError: Options of the policy or of pruning are no JSON.
    """
    values = {name: context.params.get(name) for name in SieveConfig.model_fields}
    given = {name: value for name, value in values.items() if value is not None}
    reasons = []
    for name in ("policy_options", "prune_options"):
        if isinstance(text := given.get(name), str):
            try:
                given[name] = read_json(text)
            except ValueError as error:
                shown = textwrap.shorten(repr(text), 200, placeholder="...")
                reasons.append(
                    f"{name} must be JSON such as '{{\"name\": 1}}', and {shown} is not: {error}"
                )
    if reasons:
        raise ConfigError(reasons)
    return given


def check_settings(settings: Mapping[str, Any]) -> SieveConfig:
    """The configuration that the settings make, those of the policy and of pruning included.

    Raises:
        ConfigError: Every problem found, in words.
    """
    # Imported here: torch takes seconds, which `--help` should not cost.
    from kvsieve.policies import parse_settings
    from kvsieve.pruning import pruning_from_config

    config = parse_settings(settings)
    pruning_from_config(config)
    return config
