"""What figures are drawn from: series, bars, references and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """Points that belong together. NaN as `y` is a gap.

    Attributes:
        name: Name in the legend.
        x: Positions.
        y: Values, as many as `x`.
        low: Lower ends of the values' intervals; empty for none, NaN for a value without.
        high: Upper ends, as many as `low`.
        labels: A text per point, written beside it; empty for none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_lengths(self.name, len(self.x), y=self.y)
        if len(self.low) != len(self.high):
            raise ValueError(f"{self.name}: {len(self.low)} lower and {len(self.high)} upper ends")
        for name, values in (("low", self.low), ("labels", self.labels)):
            if values:
                _check_lengths(self.name, len(self.x), **{name: values})


@dataclass(frozen=True)
class Reference:
    """A value that the series are held against, such as the score with the full KV cache.

    Attributes:
        name: Name in the legend.
        y: The value.
        low: Lower end of its interval, if it has one.
        high: Upper end.
    """

    name: str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mark:
    """A point to be seen first: a ring around it and its name in the legend."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Bars:
    """One bar per category.

    Attributes:
        name: Name in the legend.
        values: Lengths, one per category; NaN leaves a bar out.
        low: Lower ends of the values' intervals; empty for none.
        high: Upper ends, as many as `low`.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high):
            raise ValueError(f"{self.name}: {len(self.low)} lower and {len(self.high)} upper ends")
        if self.low:
            _check_lengths(self.name, len(self.values), low=self.low)


def reach(value: float, low: float, high: float) -> list[list[float]]:
    """An interval as matplotlib's error bars take it: distances from the value, never negative."""
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _check_lengths(name: str, expected: int, **values: Sequence[object]) -> None:
    for what, given in values.items():
        if len(given) != expected:
            raise ValueError(f"{name}: {len(given)} {what} for {expected} places")
