"""Heat maps with their numbers in the cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from kvsieve.reports.canvas import FONT_SIZE, INK, WIDTH, add_titles, draw, number_text
from kvsieve.reports.svg import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

# Uniform for the eye, also for one that sees few colours, and from dark to light in greyscale.
# J. R. Nunez, C. R. Anderton and R. S. Renslow, "Optimizing colormaps with consideration for color
# vision deficiency", PLoS ONE 13(7), 2018.
COLOURS = "cividis"
MAX_COLUMNS_WITH_NUMBERS = 32
MAX_CELLS_WITH_NUMBERS = 1600
_MISSING = "#eeeeee"


def heat_figure(
    values: Sequence[Sequence[float | None]],
    *,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    row_label: str,
    column_label: str,
    title: str = "",
    low: float = 0.0,
    high: float = 1.0,
    value_label: str = "",
    decimals: int = 2,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """A map of values over rows and columns, with a colour bar.

    Args:
        values: Rows of values, from the top; None or NaN where there is none.
        row_labels: Names of the rows, from the top.
        column_labels: Names of the columns, from the left.
        row_label: What the rows are.
        column_label: What the columns are.
        title: Line above the figure.
        low: Value of the darkest colour; what is below looks like it.
        high: Value of the lightest colour.
        value_label: What the values are, at the colour bar.
        decimals: Decimals of the numbers in the cells. Maps of more than 32 columns or 1600 cells
            show no numbers; a table has to.
        alt: What the picture shows; without, it is made from the values' extremes.
        caption: Line below the picture.

    Raises:
        KvsieveError: matplotlib is not installed.
        ValueError: Labels and values do not fit each other.
    """
    shape = (len(row_labels), len(column_labels))
    if 0 in shape or len(values) != shape[0] or any(len(row) != shape[1] for row in values):
        raise ValueError(f"expected values of shape {shape}, as the labels have it")
    grid = np.array([[math.nan if cell is None else cell for cell in row] for row in values], float)
    numbers = shape[1] <= MAX_COLUMNS_WITH_NUMBERS and grid.size <= MAX_CELLS_WITH_NUMBERS
    texts = [[_cell(value, decimals) for value in row] for row in grid]
    longest = max(map(len, column_labels))
    wanted = max(0.4, 0.09 * max(len(text) for row in texts for text in row) + 0.1)
    if shape[1] <= 8:  # Room enough to write the columns' names level.
        wanted = max(wanted, min(0.75, 0.09 * longest + 0.05))
    cell = (wanted, 0.29) if numbers else (0.13, 0.13)
    # Steeply written column names take height, those of rows width.
    steep = longest * 0.09 > cell[0]
    width = 1.9 + 0.085 * max(map(len, row_labels)) + shape[1] * cell[0]
    height = 1.2 + 0.07 * steep * longest + shape[0] * cell[1]

    def paint(axes: Axes) -> None:
        import matplotlib
        from matplotlib.colors import Normalize

        colours = matplotlib.colormaps[COLOURS].resampled(128).with_extremes(bad=_MISSING)
        scale = Normalize(low, high, clip=True)
        mesh = axes.pcolormesh(
            grid,
            cmap=colours,
            norm=scale,
            edgecolors="white" if numbers else "face",
            linewidth=0.8 if numbers else 0.1,
        )
        if numbers:
            for row, column in np.ndindex(*shape):
                value = grid[row, column]
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    texts[row][column],
                    color=INK if math.isnan(value) else readable_on(colours, scale(value)),
                    ha="center",
                    va="center",
                    fontsize=FONT_SIZE - 1,
                ).set_in_layout(False)
        _set_ticks(axes, row_labels, column_labels, cell, steep)
        sheet = axes.get_figure(root=True)
        assert sheet is not None
        bar = sheet.colorbar(mesh, ax=axes, label=fill(value_label, 40), aspect=18, pad=0.02)
        if bar.solids:
            # By default a bitmap inside the picture, blurred where the picture is enlarged.
            bar.solids.set_rasterized(False)
            bar.solids.set_edgecolor("face")
        bar.outline.set_visible(False)
        add_titles(axes, title, column_label, row_label, 0, width=width)

    return draw(
        paint,
        alt=alt or _describe(grid, title, row_label, column_label, row_labels, column_labels),
        caption=caption,
        width=max(width, 0.8 * WIDTH),
        height=height,
    )


def _set_ticks(
    axes: Axes,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    cell: tuple[float, float],
    steep: bool,
) -> None:
    """Names of rows and columns; where cells are small, of some."""
    axes.grid(False)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    every = math.ceil(0.17 / cell[1])
    axes.set_yticks(np.arange(0.5, len(row_labels), every), row_labels[::every])
    needed = 0.17 if steep else 0.09 * max(map(len, column_labels))
    every = math.ceil(needed / cell[0])
    axes.set_xticks(np.arange(0.5, len(column_labels), every), column_labels[::every])
    if steep:
        axes.tick_params(axis="x", rotation=90)


def _cell(value: float, decimals: int) -> str:
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.{decimals}f}"


def readable_on(colours: Colormap, position: float) -> str:
    """Black or white, whichever has more contrast on a colour of a map, at 0 to 1.

    Relative luminance and contrast ratio are those of WCAG 2.2; the better of the two is always
    above its 4.5 to 1 for text.
    """
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in colours(position)[:3]
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _describe(
    grid: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    title: str,
    row_label: str,
    column_label: str,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
) -> str:
    what = f"{title or 'Heat map'}, {row_label} against {column_label}"
    if np.isnan(grid).all():
        return f"{what}: no values."

    def place(flat: np.intp) -> str:
        row, column = divmod(int(flat), grid.shape[1])
        value = number_text(float(grid[row, column]))
        return f"{value} at {row_labels[row]}, {column_labels[column]}"

    lowest, highest = place(np.nanargmin(grid)), place(np.nanargmax(grid))
    mean = number_text(float(np.nanmean(grid)))
    return f"{what}: lowest {lowest}; highest {highest}; mean {mean}."
