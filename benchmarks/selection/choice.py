"""ASL's layer from a prompt's judged layers, and its parameters from those of several prompts.

A *trace* is the rank variance by layer, over that at its first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Trace = Mapping[int, float]

STEP = 0.01
"""Thresholds that are tried lie so far apart."""


@dataclass(frozen=True)
class Chosen:
    """ASL's parameters for one budget.

    Attributes:
        first_layer: The first judged layer.
        threshold: Share of the variance there below which ranks have settled.
        mean_layer: Mean layer at which the prompts they are taken from are pruned.
        settled: Share of these prompts that settle before the deepest layer.
    """

    first_layer: int
    threshold: float
    mean_layer: float
    settled: float


def read_trace(record: Mapping[str, str | float]) -> dict[int, float]:
    """A trace from a report, whose layers are text."""
    return {int(layer): float(value) for layer, value in record.items()}


def rescaled(trace: Trace, first_layer: int) -> dict[int, float]:
    """The trace with another first judged layer."""
    scale = trace[first_layer]
    return {layer: value / scale for layer, value in trace.items() if layer >= first_layer}


def peak_layer(traces: Sequence[Trace]) -> int:
    """The layer where the variance is largest for the prompts together.

    Each prompt counts as a share of its own largest value; of two equal layers the lower one.
    """
    shares = [
        {layer: value / max(trace.values()) for layer, value in trace.items()} for trace in traces
    ]
    return max(sorted(traces[0]), key=lambda layer: sum(share[layer] for share in shares))


def settled_layer(trace: Trace, threshold: float, max_layer: int) -> tuple[int, bool]:
    """Where ASL prunes a prompt.

    Args:
        trace: From the first judged layer on, where it is 1.
        threshold: Share below which ranks have settled.
        max_layer: Where a prompt is pruned in any case.

    Returns:
        The layer, and whether ranks had settled there.
    """
    first = min(trace)
    for layer in range(first + 1, max_layer + 1):
        if trace[layer] < threshold:
            return layer, True
    return max_layer, False


def choose(traces: Sequence[Trace], first_layer: int, target_layer: int, max_layer: int) -> Chosen:
    """The threshold with which prompts are pruned after `target_layer` on average.

    It is chosen by cost alone: no answer is looked at. Of two that are as near, the lower one.

    Args:
        traces: From a layer at or before `first_layer` on.
        first_layer: The first judged layer.
        target_layer: The mean that is wanted.
        max_layer: Where a prompt is pruned in any case.
    """
    scaled = [rescaled(trace, first_layer) for trace in traces]
    candidates = [round(step * STEP, 2) for step in range(1, round(1 / STEP) + 1)]

    def mean_layer(threshold: float) -> float:
        return sum(settled_layer(one, threshold, max_layer)[0] for one in scaled) / len(scaled)

    threshold = min(candidates, key=lambda one: (abs(mean_layer(one) - target_layer), one))
    settled = [settled_layer(one, threshold, max_layer)[1] for one in scaled]
    return Chosen(first_layer, threshold, mean_layer(threshold), sum(settled) / len(settled))
