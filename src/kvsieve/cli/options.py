"""Command-line options for the sieve's settings, one per field of `SieveConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError

_PANEL = "Sieve"


def _option(field: str) -> Any:
    settings = SieveConfig.model_fields[field]
    assert settings.description is not None
    shown = "" if settings.default is None else f" Default: {settings.default}."
    return typer.Option(
        help=settings.description + shown, rich_help_panel=_PANEL, show_default=False
    )


Policy = Annotated[str | None, _option("policy")]
Budget = Annotated[str | None, _option("budget")]
MinBudget = Annotated[int | None, _option("min_budget")]
MaxBudget = Annotated[int | None, _option("max_budget")]
Mode = Annotated[str | None, _option("mode")]
ModeEndpoint = Annotated[bool | None, _option("mode_endpoint")]
ForcedTokens = Annotated[bool | None, _option("forced_tokens")]
FullLayers = Annotated[str | None, _option("full_layers")]
ObservationWindow = Annotated[int | None, _option("observation_window")]
PoolSize = Annotated[int | None, _option("pool_size")]
Pooling = Annotated[str | None, _option("pooling")]
NumSinkTokens = Annotated[int | None, _option("num_sink_tokens")]


def check_model(model: str) -> None:
    """Say so if the model is a path that does not exist.

    vLLM and Transformers would take it for a name on the Hugging Face hub.

    Raises:
        ConfigError: The folder does not exist.
    """
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise ConfigError([f"there is no folder {model}"])


def given_settings(context: typer.Context) -> dict[str, Any]:
    """The settings of the sieve that were given on the command line, by field name."""
    values = {name: context.params.get(name) for name in SieveConfig.model_fields}
    return {name: value for name, value in values.items() if value is not None}
