"""From curves to layers and threshold. Every rule is stated here and in `docs/calibration.md`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsieve.calibrate.measure import FIXED, PromptCurves
from kvsieve.core.pruning import Prune, PruneName, PruneReason
from kvsieve.inspect.ranks import Stability, calibrated_l_min
from kvsieve.pruning import (
    PRUNE_METHODS,
    LayerChoice,
    PruneMethod,
    PruneOptions,
    PruneSettings,
    prune_settings,
)
from kvsieve.pruning.calibration import MethodCalibration

SLACK = 0.10
"""A layer is as good as the best whose distance is at most this much larger."""

MIN_SAVING = 0.10
"""Pruning so deep that it saves less than this share of the prefill is not worth going on for."""

LOWEST_THRESHOLD, HIGHEST_THRESHOLD = 0.05, 0.95


def computed_share(method: PruneMethod, layer: int, num_layers: int, kept_share: float) -> float:
    """Token-layers that a prefill pruned at a layer computes, as a share of the whole's."""
    whole = layer + 1
    rest = num_layers if method.num_passes == 2 else num_layers - whole
    return (whole + kept_share * rest) / num_layers


def mean_distances(each: Sequence[PromptCurves], method: PruneName) -> dict[int, float]:
    """Mean squared distance by layer, as a share of the mean squared length of the full state."""
    norm = statistics.fmean(one.squared_norm for one in each)
    return {
        layer: statistics.fmean(one.distances[method][layer] for one in each) / norm
        for layer in each[0].distances[method]
    }


def earliest_close(distances: Mapping[int, float]) -> int:
    """The earliest layer whose distance is within `SLACK` of the best one's.

    The authors of FastKV take the best itself, which deeper layers nearly always are: they drop
    less. So the layer that saves more is taken where the difference is small.
    """
    best = min(distances.values())
    return min(layer for layer, value in distances.items() if value <= best * (1 + SLACK))


def last_worthwhile(method: PruneMethod, num_layers: int, kept_share: float) -> int:
    """The first layer at which pruning would save less than `MIN_SAVING`; the last if none is."""
    return next(
        (
            layer
            for layer in range(num_layers)
            if 1 - computed_share(method, layer, num_layers, kept_share) < MIN_SAVING
        ),
        num_layers - 1,
    )


def lowest_relative(stability: Stability, layer: int, before: int) -> float:
    """How far a prompt's rank variance falls, as a share of that at `layer`.

    Looks at the layers between `layer` and `before`; at the next one, if there is none between.
    """
    scale = stability.variance[layer]
    reached = stability.variance[layer + 1 : max(before, layer + 2)]
    return min((value or 0.0) / scale for value in reached) if scale else 1.0


@dataclass(frozen=True)
class Deepest:
    """Where ASL prunes at the latest, and which rule says so."""

    layer: int
    because: Literal["close", "saving", "peak"]


def deepest_layer(
    method: PruneMethod,
    each: Sequence[PromptCurves],
    num_layers: int,
    kept_share: float,
    peak: int,
) -> Deepest:
    """The layer at which an adaptive method prunes whether ranks have settled or not.

    "close": where the distance of FastKV is first within `SLACK` of its best. "saving": where less
    than `MIN_SAVING` is left to be saved, if that is earlier. "peak": the layer after the first
    judged one, if both lie before it.
    """
    close = earliest_close(mean_distances(each, "fastkv"))
    saving = last_worthwhile(method, num_layers, kept_share)
    if max(peak + 1, min(close, saving)) == peak + 1:
        return Deepest(peak + 1, "peak")
    return Deepest(close, "close") if close <= saving else Deepest(saving, "saving")


def adaptive_choice(
    method: PruneMethod, each: Sequence[PromptCurves], num_layers: int, kept_share: float
) -> MethodCalibration:
    """Where ASL begins to judge, its threshold, and where it prunes at the latest.

    `layer`: where the rank variance of all prompts together peaks. `max_layer`: `deepest_layer`.
    `threshold`: so that the variance of the easier half of the prompts falls below it before that.
    """
    stabilities = [one.stability for one in each]
    last = num_layers - (1 if method.num_passes == 2 else 2)
    layer = calibrated_l_min(stabilities, highest=last - 1)
    deepest = deepest_layer(method, each, num_layers, kept_share, layer)
    falls = statistics.median(lowest_relative(one, layer, deepest.layer) for one in stabilities)
    return MethodCalibration(
        layer=layer,
        observed_layers=stabilities[0].l_obs,
        threshold=min(max(falls, LOWEST_THRESHOLD), HIGHEST_THRESHOLD),
        max_layer=deepest.layer,
    )


def choose(
    each: Sequence[PromptCurves], num_layers: int, kept_share: float
) -> dict[PruneName, MethodCalibration]:
    """Layers and threshold of every method."""
    found: dict[PruneName, MethodCalibration] = {}
    for method in PRUNE_METHODS.values():
        if method.name in FIXED:
            layer = earliest_close(mean_distances(each, method.name))
            found[method.name] = MethodCalibration(layer=layer)
        else:
            found[method.name] = adaptive_choice(method, each, num_layers, kept_share)
    return found


def settings_of(name: PruneName, found: MethodCalibration, num_layers: int) -> PruneSettings:
    """The settings that a calibrated method has in a server.

    Raises:
        ConfigError: They do not fit the model: a fault in the rules above.
    """
    calibrated = found.model_dump(exclude_none=True)
    return prune_settings(Prune(name), PruneOptions(), num_layers, calibrated)


def pruned_at(settings: PruneSettings, one: PromptCurves) -> tuple[int, PruneReason]:
    """Where a calibrated method prunes a prompt, and why there."""
    if not settings.method.is_adaptive:
        return settings.layer, "fixed"
    choice = LayerChoice(settings, one.num_tokens, one.num_keep)
    for layer in range(settings.layer, settings.last_scored_layer + 1):
        choice.judge(layer, one.stability.variance[layer] or 0.0)
        if choice.layer is not None and choice.reason is not None:
            return choice.layer, choice.reason
    raise AssertionError("a calibrated method has a deepest layer")
