"""The figures of reports: lines, points, bars, heat maps, and quality against KV memory.

Every series has a colour, a marker and a dash pattern (bars: a hatch) of its own, so that it is
told from the others in greyscale and by readers who see few colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsieve.reports.bars import bar_figure
from kvsieve.reports.heat import heat_figure
from kvsieve.reports.plot import Intervals, plot
from kvsieve.reports.series import Bars, Mark, Reference, Series
from kvsieve.reports.svg import Figure

__all__ = [
    "Bars",
    "Figure",
    "Mark",
    "Reference",
    "Series",
    "bar_figure",
    "heat_figure",
    "line_figure",
    "scatter_figure",
    "trade_off_figure",
]


def line_figure(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    x_log: bool = False,
    x_ticks: Mapping[float, str] | None = None,
    y_range: tuple[float, float] | None = None,
    reference: Reference | None = None,
    mark: Mark | None = None,
    intervals: Intervals = "band",
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Lines through the points of each series.

    Args:
        series: What is drawn; at least one.
        x_label: Name and unit of x.
        y_label: Name and unit of y.
        title: Line above the figure.
        x_log: Logarithmic x; every x is then above 0.
        x_ticks: Texts at positions of x, instead of numbers that are chosen.
        y_range: Ends of the y axis; without, they follow from the data.
        reference: Horizontal dashed line.
        mark: Point to be seen first.
        intervals: How intervals are drawn, as bands or as error bars.
        alt: What the picture shows; without, it is made from the series.
        caption: Line below the picture.

    Raises:
        KvsieveError: matplotlib is not installed.
    """
    return plot(
        series,
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_log=x_log,
        x_ticks=x_ticks,
        y_range=y_range,
        reference=reference,
        mark=mark,
        intervals=intervals,
        connect=True,
        alt=alt,
        caption=caption,
    )


def scatter_figure(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    x_log: bool = False,
    x_ticks: Mapping[float, str] | None = None,
    y_range: tuple[float, float] | None = None,
    reference: Reference | None = None,
    mark: Mark | None = None,
    connect: bool = False,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Points with their labels and, as error bars, their intervals. Arguments as `line_figure`'s.

    Args:
        connect: Join the points of a series, in their order.
    """
    return plot(
        series,
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_log=x_log,
        x_ticks=x_ticks,
        y_range=y_range,
        reference=reference,
        mark=mark,
        intervals="bars",
        connect=connect,
        alt=alt,
        caption=caption,
    )


def trade_off_figure(
    series: Sequence[Series],
    *,
    x_label: str = "KV memory held, % of full",
    y_label: str = "score",
    title: str = "Quality against KV memory",
    x_log: bool = True,
    x_ticks: Mapping[float, str] | None = None,
    y_range: tuple[float, float] | None = (0.0, 1.0),
    full: Reference | None = None,
    recommended: Mark | None = None,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Quality against KV memory, the figure that answers "which budget should I take?".

    Args:
        series: One per policy: x is KV memory in per cent of full, y the score with its interval,
            labels the budgets.
        x_label: Name and unit of x.
        y_label: Name of the score.
        title: Line above the figure.
        x_log: Logarithmic x, where budgets that double stand equally far apart.
        x_ticks: Texts at positions of x, instead of numbers that are chosen.
        y_range: Ends of the y axis; None: from the data.
        full: Score with the full KV cache: a dashed line, with its interval as a band.
        recommended: The point to take.
        alt: What the picture shows; without, it is made from the series.
        caption: Line below the picture.
    """
    return scatter_figure(
        series,
        x_label=x_label,
        y_label=y_label,
        title=title,
        x_log=x_log,
        x_ticks=x_ticks,
        y_range=y_range,
        reference=full,
        mark=recommended,
        connect=True,
        alt=alt,
        caption=caption,
    )
