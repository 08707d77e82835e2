"""Ratios of pairs that were measured side by side, and what several of them come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_REPEATS_FOR_INTERVAL = 5
"""Below, Student's t is so wide that it only hides the range, which is shown anyway."""


@dataclass(frozen=True)
class Ratios:
    """What the ratios of several pairs come to.

    Attributes:
        median: Median over the pairs.
        min: The smallest.
        max: The largest.
        repeats: Number of pairs.
        mean: Geometric mean; None with fewer than `MIN_REPEATS_FOR_INTERVAL` pairs.
        low: Lower end of the 95% interval of that mean (Student's t on the logarithms).
        high: Its upper end.
    """

    median: float
    min: float
    max: float
    repeats: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


def summarise_ratios(ratios: Sequence[float | None]) -> Ratios | None:
    """Summarise the ratios of all pairs.

    Returns:
        The summary; None if a pair has no ratio (its divisor was 0 or was not measured),
        because the others alone would be a chosen sample.
    """
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) != len(ratios):
        return None
    mean = low = high = None
    if len(known) >= MIN_REPEATS_FOR_INTERVAL and min(known) > 0:
        logs = [math.log(ratio) for ratio in known]
        centre = statistics.fmean(logs)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        half = student_t(0.975, len(logs) - 1) * error
        mean, low, high = (math.exp(centre + shift) for shift in (0, -half, half))
    return Ratios(statistics.median(known), min(known), max(known), len(known), mean, low, high)


def ratio(numerator: float | None, divisor: float | None) -> float | None:
    """The ratio of two measured values; None if there is none."""
    if numerator is None or not divisor:
        return None
    return numerator / divisor


def student_t(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution.

    Args:
        share: In [0.5, 1).
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < share:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        if _student_cdf(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """Share of Student's t distribution below a `t >= 0`.

    The finite series for whole degrees of freedom: Abramowitz and Stegun, Handbook of
    Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return (1 + inside) / 2
