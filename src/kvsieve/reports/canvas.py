"""Where figures are drawn: matplotlib without its global state, and one look for all of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from kvsieve.core.errors import KvsieveError
from kvsieve.reports.svg import Figure, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.2
"""Width of a figure in inches. Its text is then readable on a phone and not huge on a desk."""
FONT_SIZE = 9.5
"""Of all text, in points."""
INK = "#1a1a1a"

# Text is drawn as shapes of the font that matplotlib brings: the figure then looks the same on a
# machine without fonts, and no browser's other font makes labels run into each other.
_STYLE: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "kvsieve",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 6,
    "hatch.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Look:
    """How a series is told from the others, in colour and without.

    Attributes:
        colour: Hex colour.
        marker: Shape of a point, as matplotlib names it.
        dashes: Lengths of dashes and gaps, in line widths; empty is a solid line.
        hatch: Pattern in a bar, as matplotlib names it.
    """

    colour: str
    marker: str
    dashes: tuple[float, ...]
    hatch: str


# Colours: M. Okabe and K. Ito, "Color Universal Design" (2008), black kept for references and the
# yellow, which is too light for a line on white, left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (4, 1.5),
    (1, 1.2),
    (6, 1.5, 1, 1.5),
    (2.5, 1),
    (6, 1.5, 1, 1.5, 1, 1.5),
    (1, 3),
)
_HATCHES = ("", "///", "..", "\\\\\\", "xxx", "---", "+++")

ERROR_BAR: dict[str, Any] = {"ecolor": INK, "elinewidth": 1.1, "capsize": 2.5, "fmt": "none"}
REFERENCE_DASHES: tuple[float, ...] = (9, 4)


def look(number: int) -> Look:
    """The look of the n-th series. Seven differ in marker, dashes and hatch each, 42 in some."""
    colour = _COLOURS[number % len(_COLOURS)]
    style = number % len(_MARKERS)
    return Look(colour, _MARKERS[style], _DASHES[style], _HATCHES[style])


def draw(
    paint: Callable[[Axes], None],
    *,
    alt: str,
    caption: str = "",
    width: float = WIDTH,
    height: float = 3.6,
) -> Figure:
    """Draw one set of axes.

    Args:
        paint: Draws on the axes it gets; called once.
        alt: What the picture shows, in words.
        caption: Line below the picture.
        width: Width in inches.
        height: Height in inches.

    Returns:
        The figure: the same bytes for the same input and the same matplotlib.

    Raises:
        KvsieveError: matplotlib is not installed.
    """
    with _our_settings():
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Sheet

        # 72, as an SVG has: what is measured while painting is then right in the file.
        sheet = Sheet(figsize=(width, height), dpi=72, layout="constrained")
        FigureCanvasSVG(sheet)
        paint(sheet.subplots())
        drawn = StringIO()
        sheet.savefig(drawn, format="svg", metadata=_NO_METADATA)
    return Figure(inline_svg(drawn.getvalue(), alt), alt, caption)


def add_titles(
    axes: Axes, title: str, x_label: str, y_label: str, entries: int, *, width: float = WIDTH
) -> None:
    """Name the figure and its axes, wrapped where they are long, and put the legend below.

    Args:
        axes: Axes on which everything is drawn.
        title: Line above the figure.
        x_label: Name of the x axis.
        y_label: Name of the y axis.
        entries: Entries of the legend, 0 for none.
        width: Width of the figure, in inches.
    """
    sheet = axes.get_figure(root=True)
    assert sheet is not None
    if title:
        # Over the whole sheet: a long title would push narrow axes aside.
        sheet.suptitle(
            fill(title, int(11 * width)),
            x=0.01,
            ha="left",
            fontsize=FONT_SIZE + 1.5,
            fontweight="bold",
        )
    axes.set_xlabel(fill(x_label, int(11 * width)))
    axes.set_ylabel(fill(y_label, 40))
    if entries:
        handles, names = axes.get_legend_handles_labels()
        names = [shorten(name, 60, placeholder=" …") or name[:60] for name in names]
        longest = max(map(len, names))
        columns = max(1, min(3, len(names), int(68 / (longest + 8))))
        sheet.legend(handles, names, loc="outside lower center", ncols=columns)


def number_text(value: float) -> str:
    """A number for a reader: three digits or so, no exponent, thousands apart."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0").rstrip(".")


@contextmanager
def _our_settings() -> Iterator[None]:
    """Our style instead of a user's matplotlibrc; whatever was set before is set again after."""
    try:
        import matplotlib
    except ImportError as error:
        raise KvsieveError(
            "figures need matplotlib, which is not installed;"
            " install it with `pip install 'kvsieve[eval]'`"
        ) from error
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A box stands for what the font lacks, in the figure; the user can do nothing about it.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield
