"""The methods by name, with their authors' parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.pruning import PruneName, PruneReason

AUTHORS_LAYERS = 32
"""Depth of the models for which the authors give layer numbers."""


@dataclass(frozen=True)
class PruneMethod:
    """A published way to prune a prompt while it is read.

    Attributes:
        name: Its name in settings and requests.
        summary: One line for lists.
        source: Where it was published.
        scores_by: "window": softmax attention of the last `window` queries, pooled per head and
            summed over all heads; "last_query": the last query's products with the keys, summed
            over all heads, without softmax or scale.
        window: Last queries that score, in tokens; these tokens are always kept, unless the
            last query alone scores.
        pooling: Kind of pooling over neighbouring scores.
        pool_size: Its width, in tokens.
        is_adaptive: Whether the layer is chosen per prompt, from the variance of ranks.
        num_passes: 1: the kept tokens go on from the selection layer; 2: they are read again
            from the first layer.
        layer: The authors' selection layer (first judged layer, if adaptive), of 32.
        observed_layers: Layers whose ranks are compared, if adaptive.
        threshold: Share of the variance at the first judged layer below which ranks have settled.
    """

    name: PruneName
    summary: str
    source: str
    scores_by: Literal["window", "last_query"]
    window: int
    pooling: Literal["max", "avg"]
    pool_size: int
    is_adaptive: bool
    num_passes: Literal[1, 2]
    layer: int
    observed_layers: int = 8
    threshold: float = 0.3

    @property
    def reasons(self) -> tuple[PruneReason, ...]:
        """Why it may prune a prompt where it does, or leave it whole."""
        if not self.is_adaptive:
            return ("fixed",)
        return ("threshold", "deepest", "last" if self.num_passes == 2 else "never")


_METHODS = (
    PruneMethod(
        name="asl",
        summary="From the layer where the ranks of tokens settle, chosen per prompt",
        source="arXiv 2601.07667",
        scores_by="window",
        window=32,
        pooling="avg",
        pool_size=7,
        is_adaptive=True,
        num_passes=1,
        layer=10,
    ),
    PruneMethod(
        name="fastkv",
        summary="From a fixed layer, by the attention of the last queries",
        source="arXiv 2502.01068",
        scores_by="window",
        window=8,
        pooling="max",
        pool_size=7,
        is_adaptive=False,
        num_passes=1,
        layer=15,
    ),
    PruneMethod(
        name="gemfilter",
        summary="Tokens chosen at a fixed layer are read again from the first",
        source="arXiv 2409.17422",
        scores_by="last_query",
        window=1,
        pooling="avg",
        pool_size=5,
        is_adaptive=False,
        num_passes=2,
        layer=13,
    ),
    PruneMethod(
        name="asl-two-pass",
        summary="As asl, and the chosen tokens are read again from the first layer",
        source="arXiv 2601.07667",
        scores_by="window",
        window=32,
        pooling="avg",
        pool_size=7,
        is_adaptive=True,
        num_passes=2,
        layer=10,
    ),
)

PRUNE_METHODS: dict[str, PruneMethod] = {method.name: method for method in _METHODS}
"""Methods by name."""
