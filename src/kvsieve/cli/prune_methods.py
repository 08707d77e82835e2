"""The part of `kvsieve policies` that lists the methods to prune prompts while they are read."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvsieve.pruning import PRUNE_METHODS, PruneMethod
from kvsieve.pruning.method import AUTHORS_LAYERS


def prune_facts() -> list[dict[str, Any]]:
    """The methods as JSON values."""
    return [
        {
            "name": method.name,
            "summary": method.summary,
            "source": method.source,
            "layer": method.layer,
            "of_layers": AUTHORS_LAYERS,
            "is_adaptive": method.is_adaptive,
            "window": method.window,
            "pooling": method.pooling,
            "pool_size": method.pool_size,
            "passes": method.num_passes,
            # What only an adaptive method has.
            "observed_layers": method.observed_layers if method.is_adaptive else None,
            "threshold": method.threshold if method.is_adaptive else None,
        }
        for method in PRUNE_METHODS.values()
    ]


def prune_table() -> Table:
    """The methods as a table."""
    table = Table(
        show_lines=True,
        title="Pruning while a prompt is read (--prune)",
        title_justify="left",
        caption=f"layer: the authors', of {AUTHORS_LAYERS}, scaled to the model's depth",
        caption_justify="left",
    )
    table.add_column("method")
    table.add_column("where it prunes")
    table.add_column("layer")
    table.add_column("window")
    table.add_column("pooling")
    table.add_column("passes")
    for method in PRUNE_METHODS.values():
        table.add_row(
            method.name,
            f"{method.summary}\n{method.source}",
            _layer(method),
            str(method.window),
            f"{method.pooling} {method.pool_size}",
            str(method.num_passes),
        )
    return table


def _layer(method: PruneMethod) -> str:
    return f"after {method.layer}, per prompt" if method.is_adaptive else str(method.layer)
