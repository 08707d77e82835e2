"""What was measured, as JSON values: the curves, and what the choice makes of each prompt."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.calibrate.choose import (
    HIGHEST_THRESHOLD,
    LOWEST_THRESHOLD,
    MIN_SAVING,
    SLACK,
    computed_share,
    deepest_layer,
    lowest_relative,
    mean_distances,
    pruned_at,
    settings_of,
)
from kvsieve.calibrate.measure import FIXED, PromptCurves
from kvsieve.core.pruning import PruneName
from kvsieve.inspect.ranks import mean_variance
from kvsieve.pruning import PRUNE_METHODS
from kvsieve.pruning.calibration import MethodCalibration


def measured(
    each: Sequence[PromptCurves],
    found: Mapping[PruneName, MethodCalibration],
    num_layers: int,
    kept_share: float,
) -> dict[str, Any]:
    """The curves, and where the calibrated methods prune each prompt.

    Args:
        each: The prompts' curves.
        found: What was chosen from them.
        num_layers: Layers of the model.
        kept_share: Share of a prompt that is kept.
    """
    pruned = {
        name: [pruned_at(settings_of(name, one, num_layers), prompt) for prompt in each]
        for name, one in found.items()
    }
    methods = {}
    for name, one in found.items():
        method = PRUNE_METHODS[name]
        shares = [computed_share(method, at, num_layers, kept_share) for at, _ in pruned[name]]
        facts: dict[str, Any] = {"computed_share": statistics.fmean(shares)}
        if method.is_adaptive:
            deepest = deepest_layer(method, each, num_layers, kept_share, one.layer)
            facts["max_layer_because"] = deepest.because
            facts["lowest_relative_variance"] = [
                lowest_relative(prompt.stability, one.layer, deepest.layer) for prompt in each
            ]
        methods[name] = facts
    return {
        "rules": {
            "slack": SLACK,
            "min_saving": MIN_SAVING,
            "threshold_range": [LOWEST_THRESHOLD, HIGHEST_THRESHOLD],
        },
        "rank_variance": _by_layer(mean_variance([one.stability for one in each])),
        "distance": {name: _by_layer(mean_distances(each, name)) for name in FIXED},
        "methods": methods,
        "prompts": [
            {
                "name": one.name,
                "tokens": one.num_tokens,
                "kept_tokens": one.num_keep,
                "rank_variance": _by_layer(dict(enumerate(one.stability.variance))),
                "distance": {
                    name: {str(layer): value / one.squared_norm for layer, value in curve.items()}
                    for name, curve in one.distances.items()
                },
                "pruned_at": {
                    name: {"layer": where[index][0], "reason": where[index][1]}
                    for name, where in pruned.items()
                },
            }
            for index, one in enumerate(each)
        ],
    }


def _by_layer(values: Mapping[int, float | None]) -> dict[str, float]:
    return {str(layer): value for layer, value in values.items() if value is not None}
