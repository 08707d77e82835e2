"""Lines and points of one or more series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from kvsieve.reports.canvas import (
    ERROR_BAR,
    INK,
    REFERENCE_DASHES,
    add_titles,
    draw,
    look,
    number_text,
)
from kvsieve.reports.labels import Point, write_labels
from kvsieve.reports.series import Mark, Reference, Series, reach
from kvsieve.reports.svg import PART, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Intervals = Literal["band", "bars"]
MARKERS = 20
"""Markers that a line bears, about; with fewer points than twice as many, each has one."""


def plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str,
    x_log: bool,
    x_ticks: Mapping[float, str] | None,
    y_range: tuple[float, float] | None,
    reference: Reference | None,
    mark: Mark | None,
    intervals: Intervals,
    connect: bool,
    alt: str,
    caption: str,
) -> Figure:
    """What `line_figure` and `scatter_figure` have in common; they explain the arguments.

    Raises:
        KvsieveError: matplotlib is not installed.
        ValueError: There is no point, or an x that a logarithmic axis cannot show.
    """
    if not any(len(one.x) for one in series):
        raise ValueError("a figure needs at least one point")
    if x_log and any(x <= 0 for one in series for x in one.x):
        raise ValueError("a logarithmic axis has no place for an x of 0 or less")
    entries = len(series) + bool(reference) + bool(mark)

    def paint(axes: Axes) -> None:
        for number, one in enumerate(series):
            _paint_series(axes, one, number, intervals, connect)
        if reference:
            _paint_reference(axes, reference)
        if mark:
            axes.plot(
                mark.x,
                mark.y,
                label=mark.name,
                linestyle="none",
                marker="o",
                markersize=15,
                markerfacecolor="none",
                markeredgecolor=INK,
                markeredgewidth=1.6,
                zorder=4,
            )
        _set_x(axes, series, x_log, x_ticks)
        if y_range:
            # A little more, so that markers at the ends are whole.
            spare = 0.04 * (y_range[1] - y_range[0])
            axes.set_ylim(y_range[0] - spare, y_range[1] + spare)
        add_titles(axes, title, x_label, y_label, entries)
        labels = [
            (x, y, text)
            for one in series
            for x, y, text in zip(one.x, one.y, one.labels, strict=False)
            if text and math.isfinite(y)
        ]
        if labels:
            write_labels(axes, labels, _ink(series, reference, axes.get_xlim()))

    return draw(
        paint,
        alt=alt or _describe(series, title, f"{y_label} against {x_label}", reference, mark),
        caption=caption,
        height=3.3 + 0.2 * -(-entries // 2),
    )


def _paint_series(
    axes: Axes, one: Series, number: int, intervals: Intervals, connect: bool
) -> None:
    style = look(number)
    if one.low and intervals == "band":
        axes.fill_between(
            list(one.x), list(one.low), list(one.high), color=style.colour, alpha=0.16, linewidth=0
        )
    elif one.low:
        for x, y, low, high in zip(one.x, one.y, one.low, one.high, strict=True):
            if math.isfinite(low) and math.isfinite(high):
                bar = {**ERROR_BAR, "ecolor": style.colour}
                axes.errorbar(x, y, yerr=reach(y, low, high), **bar)
    (line,) = axes.plot(
        list(one.x),
        list(one.y),
        label=one.name,
        color=style.colour,
        marker=style.marker,
        markeredgecolor="white",
        markeredgewidth=0.8,
        # Dashes and markers of a curve of many samples would hide one another.
        markevery=max(1, len(one.x) // MARKERS) if connect else None,
        linestyle=(0, style.dashes) if connect else "none",
        zorder=3,
    )
    line.set_gid(f"{PART}series-{number}")


def _paint_reference(axes: Axes, reference: Reference) -> None:
    if reference.low is not None and reference.high is not None:
        axes.axhspan(reference.low, reference.high, color=INK, alpha=0.09, linewidth=0, zorder=1)
    axes.axhline(
        reference.y,
        label=reference.name,
        color=INK,
        linestyle=(0, REFERENCE_DASHES),
        linewidth=1.2,
        zorder=2,
    )


def _set_x(
    axes: Axes, series: Sequence[Series], x_log: bool, ticks: Mapping[float, str] | None
) -> None:
    positions = sorted({x for one in series for x in one.x})
    if x_log:
        from matplotlib.ticker import NullLocator

        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        # A little more, so that markers and labels at the ends are whole.
        spare = (positions[-1] / positions[0]) ** 0.08 if len(positions) > 1 else 2
        axes.set_xlim(positions[0] / spare, positions[-1] * spare)
    if ticks is None and x_log:
        low, high = axes.get_xlim()
        ticks = {x: number_text(x) for x in _round_numbers(low, high)}
    if ticks is not None:
        axes.set_xticks(list(ticks), list(ticks.values()))


def _round_numbers(low: float, high: float) -> list[float]:
    """Numbers 1, 2 or 5 times a power of ten between two others, at most about ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [digit * 10.0**power for power in powers for digit in digits]
    return [number for number in found if low <= number <= high]


def _ink(
    series: Sequence[Series], reference: Reference | None, x_range: Sequence[float]
) -> Iterator[list[Point]]:
    """The lines and error bars that labels should keep clear of."""
    for one in series:
        yield [(x, y) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(y)]
        for x, low, high in zip(one.x, one.low, one.high, strict=False):
            if math.isfinite(low) and math.isfinite(high):
                yield [(x, low), (x, high)]
    if reference:
        yield [(x_range[0], reference.y), (x_range[1], reference.y)]


def _describe(
    series: Sequence[Series],
    title: str,
    axes_text: str,
    reference: Reference | None,
    mark: Mark | None,
) -> str:
    """The figure in words: what a reader would take from its ends."""
    parts = [f"{title}: {axes_text}" if title else axes_text]
    for one in series:
        points = [(x, y) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(y)]
        shown = [points[0], points[-1]] if len(points) > 2 else points
        places = " to ".join(f"{number_text(y)} at {number_text(x)}" for x, y in shown)
        parts.append(f"{one.name}: {places or 'no values'}")
    if reference:
        parts.append(f"{reference.name}: {number_text(reference.y)}")
    if mark:
        parts.append(f"{mark.name}: {number_text(mark.y)} at {number_text(mark.x)}")
    return ". ".join(parts) + "."
