"""Labels beside points, where they hide as little as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsieve.reports.canvas import FONT_SIZE, INK
from kvsieve.reports.svg import PART

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Box = tuple[float, float, float, float]

SIZE = FONT_SIZE - 1.5
# Offsets of the label's centre from its point: in half widths and 7 points, nearest wishes first.
_PLACES = (
    (0.0, -1.6),
    (0.0, 1.6),
    (1.3, -1.2),
    (-1.3, -1.2),
    (1.3, 1.2),
    (-1.3, 1.2),
    (1.6, 0.0),
    (-1.6, 0.0),
    (0.0, -2.8),
    (0.0, 2.8),
)
_STEP = 7.0
_NEAR = (7.0, 22.0)
"""Of points less than this apart, sideways and up, one bears the label that they have in common."""


def write_labels(
    axes: Axes, labels: Sequence[tuple[float, float, str]], lines: Iterable[Sequence[Point]]
) -> None:
    """Write a text beside each point, clear of other labels, of points and, if possible, of lines.

    Points close above one another with the same text get one label, at the lowest.

    Args:
        axes: Axes whose limits stand.
        labels: x, y and text of each, in data coordinates.
        lines: What else is drawn (lines, error bars), each a chain of points in data coordinates.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.patheffects import withStroke
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=SIZE)
    # Where data lie on the sheet is known only when the layout is. Its pixels are points.
    sheet = axes.get_figure(root=True)
    assert sheet is not None
    sheet.draw_without_rendering()

    def place(points: Sequence[Point]) -> NDArray[np.float64]:
        return np.asarray(axes.transData.transform(list(points)))

    drawn = [_along(place(line)) for line in lines if line]
    ink = np.concatenate(drawn) if drawn else np.empty((0, 2))
    left, low, right, high = axes.bbox.extents
    frame = (float(left) + 2, float(low) + 2, float(right), float(high))
    wanted = [(place([(x, y)])[0], text) for x, y, text in labels]
    dots = np.array([point for point, _ in wanted])
    taken: list[Box] = []
    for point, text in _without_repeats(wanted):
        half = (text_to_path.get_text_width_height_descent(text, font, False)[0] / 2, 0.6 * SIZE)
        boxes = [_box(point, half, place_) for place_ in _PLACES]
        best = min(range(len(boxes)), key=lambda i: (_cost(boxes[i], frame, taken, dots, ink), i))
        box = boxes[best]
        taken.append(box)
        label = axes.annotate(
            text,
            xy=((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
            xycoords="figure points",
            ha="center",
            va="center",
            fontsize=SIZE,
            color=INK,
            zorder=5,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
        )
        label.set_in_layout(False)
        label.set_gid(f"{PART}label")


def _along(chain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points every 2 points or so along a chain."""
    pieces = [chain[:1]]
    for start, end in pairwise(chain):
        steps = max(2, int(np.hypot(*(end - start)) / 2))
        pieces.append(np.linspace(start, end, steps))
    return np.concatenate(pieces)


def _without_repeats(
    wanted: Sequence[tuple[NDArray[np.float64], str]],
) -> list[tuple[NDArray[np.float64], str]]:
    kept: list[tuple[NDArray[np.float64], str]] = []
    for point, text in sorted(wanted, key=lambda one: one[0][1]):
        if not any(text == other and _are_near(point, at) for at, other in kept):
            kept.append((point, text))
    return kept


def _are_near(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    across, along = np.abs(one - other)
    return bool(across < _NEAR[0] and along < _NEAR[1])


def _box(point: NDArray[np.float64], half: Point, place: Point) -> Box:
    # Beside a point the distance grows with the label; above and below it does not.
    x = point[0] + (0.0 if not place[0] else np.sign(place[0]) * (half[0] + 5 * abs(place[0]) - 2))
    y = point[1] + place[1] * _STEP
    return (x - half[0], y - half[1], x + half[0], y + half[1])


def _cost(
    box: Box,
    frame: Box,
    taken: Sequence[Box],
    dots: NDArray[np.float64],
    ink: NDArray[np.float64],
) -> float:
    left, low, right, high = box
    is_outside = left < frame[0] or low < frame[1] or right > frame[2] or high > frame[3]
    overlaps = sum(
        left < other[2] and other[0] < right and low < other[3] and other[1] < high
        for other in taken
    )
    on_dots = _inside(box, dots, 3.5)
    return 1000.0 * is_outside + 300.0 * overlaps + 60.0 * on_dots + _inside(box, ink, 0.5)


def _inside(box: Box, points: NDArray[np.float64], margin: float) -> int:
    x, y = points[:, 0], points[:, 1]
    in_x = (x > box[0] - margin) & (x < box[2] + margin)
    return int(np.count_nonzero(in_x & (y > box[1] - margin) & (y < box[3] + margin)))
