"""Command-line options for the sieve's settings, one per field of `SieveConfig`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvsieve.core.config import SieveConfig

_PANEL = "Sieve"


def _option(field: str) -> Any:
    description = SieveConfig.model_fields[field].description
    return typer.Option(help=description, rich_help_panel=_PANEL, show_default=False)


Policy = Annotated[str | None, _option("policy")]
Budget = Annotated[str | None, _option("budget")]
MinBudget = Annotated[int | None, _option("min_budget")]
MaxBudget = Annotated[int | None, _option("max_budget")]
FullLayers = Annotated[str | None, _option("full_layers")]
ObservationWindow = Annotated[int | None, _option("observation_window")]
PoolSize = Annotated[int | None, _option("pool_size")]
Pooling = Annotated[str | None, _option("pooling")]
NumSinkTokens = Annotated[int | None, _option("num_sink_tokens")]


def given_settings(context: typer.Context) -> dict[str, Any]:
    """The settings of the sieve that were given on the command line, by field name."""
    values = {name: context.params.get(name) for name in SieveConfig.model_fields}
    return {name: value for name, value in values.items() if value is not None}
