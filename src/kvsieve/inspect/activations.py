"""Massive activations: entries of the hidden state that are far larger than all others.

The definition is that of Sun et al. 2024 (arXiv 2402.17762): a magnitude above 100 that is at
least 1,000 times the median magnitude of the same hidden state. They sit on few tokens, in few
fixed dimensions, and those tokens draw attention whatever the text says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_MAGNITUDE = 100.0
MIN_RATIO = 1000.0
TOP_ENTRIES = 10
"""Largest entries that are kept per layer, massive or not."""
CHUNK_ENTRIES = 2**24
"""Entries of a hidden state that are looked at together; the median of a larger one is that of
evenly spread rows."""
TINY = 1e-30


@dataclass(frozen=True)
class MassiveRule:
    """When an entry of a hidden state counts as massive.

    Attributes:
        min_magnitude: Its magnitude is above this.
        min_ratio: Its magnitude is at least this many times the median magnitude.
    """

    min_magnitude: float = MIN_MAGNITUDE
    min_ratio: float = MIN_RATIO


@dataclass(frozen=True)
class Entry:
    """One entry of a hidden state.

    Attributes:
        position: The token's position in the prompt.
        dimension: Which of the hidden state's numbers it is.
        value: The number.
        ratio: Its magnitude against the median magnitude.
    """

    position: int
    dimension: int
    value: float
    ratio: float


@dataclass(frozen=True)
class LayerActivations:
    """The hidden state after one decoder layer.

    Attributes:
        layer: Number of the layer.
        median: Median magnitude of its entries.
        num_massive: Entries that are massive.
        top: The largest entries, largest first, massive or not.
        peaks: [num_tokens] float32, each token's largest magnitude.
        massive_positions: Positions with a massive entry, ascending.
    """

    layer: int
    median: float
    num_massive: int
    top: tuple[Entry, ...]
    peaks: torch.Tensor
    massive_positions: tuple[int, ...]


def median_magnitude(hidden: torch.Tensor) -> float:
    """Median magnitude of a hidden state [num_tokens, hidden_size].

    Of a state with more than `CHUNK_ENTRIES` entries, rows spread evenly over it are taken.
    """
    step = max(1, math.ceil(hidden.numel() / CHUNK_ENTRIES))
    return float(hidden[::step].float().abs().median())


def layer_activations(
    layer: int, hidden: torch.Tensor, rule: MassiveRule, top_entries: int = TOP_ENTRIES
) -> LayerActivations:
    """What stands out in a hidden state.

    Args:
        layer: Number of the decoder layer that it comes from.
        hidden: [num_tokens, hidden_size].
        rule: What counts as massive.
        top_entries: Largest entries to name.
    """
    num_tokens, hidden_size = hidden.shape
    median = median_magnitude(hidden)
    # A median of zero (a dead model) would make every ratio infinite, and JSON cannot carry that.
    floor = max(median, TINY)
    rows = max(1, CHUNK_ENTRIES // hidden_size)
    peaks = torch.empty(num_tokens)
    massive_positions: list[int] = []
    num_massive = 0
    candidates: list[tuple[float, int]] = []
    for begin in range(0, num_tokens, rows):
        magnitude = hidden[begin : begin + rows].float().abs()
        is_massive = (magnitude > rule.min_magnitude) & (magnitude >= rule.min_ratio * floor)
        num_massive += int(is_massive.sum())
        massive_positions += (is_massive.any(dim=1).nonzero()[:, 0] + begin).tolist()
        peaks[begin : begin + rows] = magnitude.amax(dim=1).cpu()
        best = magnitude.flatten().topk(min(top_entries, magnitude.numel()))
        indices = (best.indices + begin * hidden_size).tolist()
        candidates += zip(best.values.tolist(), indices, strict=True)
    candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
    entries = []
    for size, index in candidates[:top_entries]:
        position, dimension = divmod(index, hidden_size)
        value = float(hidden[position, dimension])
        entries.append(Entry(position, dimension, value, size / floor))
    return LayerActivations(
        layer, median, num_massive, tuple(entries), peaks, tuple(massive_positions)
    )


@dataclass(frozen=True)
class TokenActivations:
    """One token that stands out in the hidden states.

    Attributes:
        position: Its position in the prompt.
        is_massive: Whether it has a massive entry after any layer.
        massive_layers: Layers after which it has one, ascending.
        peak: Its largest magnitude after any layer.
        peak_ratio: The largest ratio of its magnitude to the layer's median.
        peak_layer: The layer of that ratio.
    """

    position: int
    is_massive: bool
    massive_layers: tuple[int, ...]
    peak: float
    peak_ratio: float
    peak_layer: int


def outstanding_tokens(
    each: Sequence[LayerActivations], num_tokens: int
) -> tuple[TokenActivations, ...]:
    """Tokens with the largest activations: the massive ones first, then the next largest.

    Args:
        each: The model's layers, in order.
        num_tokens: Tokens to name.
    """
    peaks = torch.stack([one.peaks for one in each])
    ratios = peaks / torch.tensor([max(one.median, TINY) for one in each])[:, None]
    best, where = ratios.max(dim=0)
    is_massive = torch.zeros(len(best), dtype=torch.bool)
    for one in each:
        is_massive[list(one.massive_positions)] = True
    order = sorted(range(len(best)), key=lambda p: (not is_massive[p], -best[p].item()))
    return tuple(
        TokenActivations(
            position=position,
            is_massive=bool(is_massive[position]),
            massive_layers=tuple(one.layer for one in each if position in one.massive_positions),
            peak=float(peaks[:, position].max()),
            peak_ratio=float(best[position]),
            peak_layer=each[int(where[position])].layer,
        )
        for position in order[:num_tokens]
    )
