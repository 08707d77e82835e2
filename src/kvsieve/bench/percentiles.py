"""Percentiles of one run, and means over its time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values do not exceed, interpolated linearly.

    Args:
        values: At least one number, in any order.
        share: In [0, 1]; 0.5 is the median.

    Raises:
        ValueError: There are no values, or `share` is out of range.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, got {share}")
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Never outside the two, which rounding of `low + part * (high - low)` could be.
    return min(max(low + (place - below) * (high - low), low), high)


def weighted_mean(values: Sequence[float], times: Sequence[float]) -> float:
    """Mean over time of a value that was looked at now and then.

    Each value counts for the time until the next look. With one look, or looks at one
    moment, it is the plain mean; without any it is 0.

    Args:
        values: What was seen.
        times: When, in ascending seconds; as many as values.
    """
    if not values:
        return 0.0
    spans = [later - earlier for earlier, later in pairwise(times)]
    if not (whole := sum(spans)):
        return statistics.fmean(values)
    return sum(value * span for value, span in zip(values, spans, strict=False)) / whole
