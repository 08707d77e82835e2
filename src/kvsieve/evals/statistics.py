"""Means of scores with 95% intervals that stay honest when samples are few.

Which interval is used:

* Scores of 0 and 1: Wilson's (1927), which has a width even where all scores agree.
* Fewer than `SMALL_SAMPLE` values: Student's t.
* More: the bias-corrected, accelerated bootstrap (Efron 1987).
* Where at most three distinct values occur, such as the differences of right and wrong, neither
  knows of what was not seen; the interval is widened to the *unseen-value* interval below.
* All values equal: the unseen-value interval alone. A value that none of the n samples showed
  may still come up with a probability of up to q = z^2 / (n + z^2), which is Wilson's bound for
  0 of n; so the mean lies between (1 - q) mean + q * (lowest value possible) and the same with
  the highest. For scores that are all 0 or all 1 this *is* Wilson's interval.

Values are sorted before they are resampled, so the order of examples changes nothing.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsieve.core.errors import KvsieveError

SMALL_SAMPLE = 20
"""Below so many values the bootstrap's intervals are too narrow to be called 95%."""

RESAMPLES = 9_999
_BATCH_VALUES = 2_000_000
"""Values resampled at once: what bounds the memory, at 8 bytes each."""

_Z = 1.959963984540054
"""The standard normal's 97.5% quantile."""

UNSEEN_FACTOR = 2.0
"""A perplexity that no sample showed is taken to be at most so many times, or one so manyth of,
that of the reference: a ratio has no bounds of its own."""

_LARGEST_LOG = math.log(sys.float_info.max)

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval.

    Attributes:
        value: The mean of the samples.
        low: Lower end of the interval, at most `value`.
        high: Upper end, at least `value`.
        count: Number of samples, or of pairs.
    """

    value: float
    low: float
    high: float
    count: int


def mean(scores: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of scores in [0, 1]; of scores that are all 0 or 1, their proportion.

    Args:
        scores: One score per example.
        seed: Of the resampling; the same seed gives the same interval.

    Raises:
        ValueError: No scores, or one that is outside [0, 1] or not a number.
        KvsieveError: SciPy is needed and not installed.
    """
    values = _checked(scores, "scores", 0.0, 1.0)
    if _is_binary(values):
        return _wilson(values)
    return _bounded_mean(values, 0.0, 1.0, seed)


def paired_difference(
    scores: Sequence[float], reference: Sequence[float], seed: int = 0
) -> Estimate:
    """The mean of `scores - reference`, example by example.

    Pairing removes what makes examples differ from one another, which is most of the spread:
    two settings compared on the same examples need far fewer of them.

    Args:
        scores: One score in [0, 1] per example.
        reference: Scores of the same examples in the same order, such as those of full KV.
        seed: Of the resampling.

    Returns:
        The difference, in [-1, 1]; negative where `scores` are worse.

    Raises:
        ValueError: No scores, unequal numbers of them, or one outside [0, 1].
        KvsieveError: SciPy is needed and not installed.
    """
    first = _checked(scores, "scores", 0.0, 1.0)
    second = _checked(reference, "reference", 0.0, 1.0)
    _check_paired(first, second)
    return _bounded_mean(first - second, -1.0, 1.0, seed)


def paired_ratio(values: Sequence[float], reference: Sequence[float], seed: int = 0) -> Estimate:
    """How many times as large `values` are: exp of the mean paired difference of logarithms.

    For perplexities, which multiply: their ratio on a window is what the window's text is less
    likely, and the geometric mean weighs a halving as much as a doubling.

    Args:
        values: One perplexity per window of text, above 0.
        reference: Perplexities of the same windows in the same order.
        seed: Of the resampling.

    Returns:
        The ratio; above 1 where `values` are worse. The unseen-value interval supposes that no
        window's ratio is beyond `UNSEEN_FACTOR` either way, or beyond the most extreme one seen.

    Raises:
        ValueError: No values, unequal numbers of them, or one that is not above 0 and finite.
        KvsieveError: SciPy is needed and not installed.
    """
    first = _checked(values, "values", math.ulp(0.0), math.inf)
    second = _checked(reference, "reference", math.ulp(0.0), math.inf)
    _check_paired(first, second)
    logs = np.log(first) - np.log(second)
    limit = max(math.log(UNSEEN_FACTOR), float(np.abs(logs).max()))
    estimate = _bounded_mean(logs, -limit, limit, seed, is_bounded=False)
    value, low, high = (
        math.exp(min(log, _LARGEST_LOG)) for log in (estimate.value, estimate.low, estimate.high)
    )
    return Estimate(value, low, high, estimate.count)


def _bounded_mean(
    values: _Values, lowest: float, highest: float, seed: int, *, is_bounded: bool = True
) -> Estimate:
    """The mean of values between two bounds, with the interval the module's text chooses."""
    values = np.sort(values)
    count = len(values)
    # Rounding may put the mean of equal values beside them.
    centre = float(np.clip(values.mean(), values[0], values[-1]))
    low, high = _unseen_value_interval(centre, count, lowest, highest)
    # Values that differ in their last bits only are equal.
    distinct = len(np.unique(values.round(9)))
    if distinct > 1:
        is_small = count < SMALL_SAMPLE
        sampled = _student(values, centre) if is_small else _bootstrap(values, seed)
        if distinct <= 3:
            low, high = min(low, sampled[0]), max(high, sampled[1])
        else:
            low, high = sampled
    low, high = min(low, centre), max(high, centre)
    if is_bounded:
        low, high = max(lowest, low), min(highest, high)
    return Estimate(centre, low, high, count)


def _unseen_value_interval(
    centre: float, count: int, lowest: float, highest: float
) -> tuple[float, float]:
    unseen = _Z**2 / (count + _Z**2)
    seen = 1 - unseen
    return seen * centre + unseen * lowest, seen * centre + unseen * highest


def _student(values: _Values, centre: float) -> tuple[float, float]:
    count = len(values)
    quantile = float(_scipy_stats().t.ppf(0.975, count - 1))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(count)
    return centre - half, centre + half


def _bootstrap(values: _Values, seed: int) -> tuple[float, float]:
    """The BCa interval, or where it is undefined the plain percentiles."""
    stats = _scipy_stats()
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            # That BCa is undefined here is what the next round is for.
            warnings.simplefilter("ignore")
            interval = stats.bootstrap(
                (values,),
                np.mean,
                axis=-1,
                vectorized=True,
                n_resamples=RESAMPLES,
                batch=max(1, _BATCH_VALUES // len(values)),
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        low, high = float(interval.low), float(interval.high)
        if math.isfinite(low) and math.isfinite(high):
            break
    return low, high


def _wilson(values: _Values) -> Estimate:
    """Wilson's score interval, whose ends at 0 and 1 are exact."""
    count = len(values)
    share = float(values.mean())
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    middle = share + _Z**2 / (2 * count)
    low = 0.0 if share == 0 else max(0.0, (middle - spread) / scale)
    high = 1.0 if share == 1 else min(1.0, (middle + spread) / scale)
    return Estimate(share, low, high, count)


def _checked(values: Sequence[float], name: str, lowest: float, highest: float) -> _Values:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be one number per sample, and at least one")
    wrong = ~np.isfinite(array) | (array < lowest) | (array > highest)
    if wrong.any():
        found = f"{array[wrong][0]} at position {int(np.argmax(wrong))}"
        raise ValueError(f"{name} must be numbers from {lowest} to {highest}, not {found}")
    return array


def _check_paired(first: _Values, second: _Values) -> None:
    if len(first) != len(second):
        raise ValueError(f"paired samples must be as many: {len(first)} and {len(second)} given")


def _is_binary(values: _Values) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _scipy_stats() -> Any:
    """`scipy.stats`, which only an evaluation needs."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise KvsieveError(
            "the intervals of an evaluation need SciPy, which is not installed here: "
            "pip install 'kvsieve[eval]'"
        ) from error
