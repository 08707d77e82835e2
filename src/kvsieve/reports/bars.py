"""Bars with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from kvsieve.reports.canvas import ERROR_BAR, INK, add_titles, draw, look, number_text
from kvsieve.reports.series import Bars, reach
from kvsieve.reports.svg import PART, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bar_figure(
    categories: Sequence[str],
    bars: Sequence[Bars],
    *,
    value_label: str,
    title: str = "",
    value_range: tuple[float, float] | None = None,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Horizontal bars, a group per category from top to bottom: long names stay readable.

    Args:
        categories: Names of the groups, from the top.
        bars: One bar in each group; told apart by colour and hatch.
        value_label: Name and unit of the values.
        title: Line above the figure.
        value_range: Ends of the value axis; without, it starts at 0.
        alt: What the picture shows; without, it is made from the values.
        caption: Line below the picture.

    Raises:
        KvsieveError: matplotlib is not installed.
        ValueError: A `Bars` has not one value per category.
    """
    if not categories or not bars:
        raise ValueError("a bar figure needs at least one category and one Bars")
    for one in bars:
        if len(one.values) != len(categories):
            raise ValueError(f"{one.name}: {len(one.values)} values, {len(categories)} categories")
    rows = range(len(categories))
    thickness = 0.8 / len(bars)

    def paint(axes: Axes) -> None:
        for number, one in enumerate(bars):
            style = look(number)
            offset = (number - (len(bars) - 1) / 2) * thickness
            drawn = axes.barh(
                [row + offset for row in rows],
                list(one.values),
                thickness * 0.92,
                label=one.name,
                facecolor=style.colour,
                # The hatch has the edge's colour.
                edgecolor="white" if style.hatch else style.colour,
                hatch=style.hatch,
                linewidth=0.5,
            )
            for patch in drawn:
                patch.set_gid(f"{PART}series-{number}")
            for row, value, low, high in zip(rows, one.values, one.low, one.high, strict=False):
                if math.isfinite(low) and math.isfinite(high):
                    axes.errorbar(value, row + offset, xerr=reach(value, low, high), **ERROR_BAR)
        axes.set_yticks(rows, [fill(name, 28) for name in categories])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_color(INK)
        if value_range:
            axes.set_xlim(*value_range)
        add_titles(axes, title, value_label, "", len(bars))

    values = "; ".join(
        f"{one.name}: "
        + ", ".join(
            f"{name} {number_text(value)}"
            for name, value in zip(categories, one.values, strict=True)
        )
        for one in bars
    )
    return draw(
        paint,
        alt=alt or f"{title or 'Bars'}. {value_label}. {values}.",
        caption=caption,
        height=1.1 + 0.22 * len(bars) + len(categories) * max(0.32, 0.2 * len(bars)),
    )
