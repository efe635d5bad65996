"""Names beside the points of a plot, so that they cover neither each other nor the points."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import cos, radians, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Line = tuple[tuple[float, float], tuple[float, float]]
Box = tuple[float, float, float, float]  # left, bottom, right, top, in points of the page
_SIZE = 8.5
_POINT = 5.5  # half of what a marker covers
_EDGE = 5.0  # what stays free along the axes
_GAPS = (4.0, 12.0, 22.0, 34.0, 48.0, 64.0)
_ANGLES = (0, 180, 90, 270, 30, 150, 330, 210, 60, 120, 300, 240)
_ROUNDS = 4  # each looks for a better place for every name, given the others
_FAR = 12.0  # from here on a thin line leads to the point
_POINTS_AN_INCH = 72


@dataclass(frozen=True)
class Label:
    """A name for the point at (x, y) in the units of the axes."""

    text: str
    x: float
    y: float
    color: str


def put_labels(
    figure: Figure,
    axes: Axes,
    labels: Sequence[Label],
    lines: Sequence[Line],
    points: Sequence[tuple[float, float]] = (),
) -> None:
    """Write the names. The layout of the figure and the limits of the axes must be final.

    lines: upright or level ones that names should rather not cover; points: other marks that they should not. Both in
    the units of the axes.
    """
    page = _Page(figure, axes)
    anchors = [page.point(label.x, label.y) for label in labels]
    sizes = [page.size(label.text) for label in labels]
    marks = [page.point(x, y) for x, y in dict.fromkeys([*((label.x, label.y) for label in labels), *points])]
    for label, anchor, (place, gap) in zip(labels, anchors, _places(anchors, sizes, marks, page, lines), strict=True):
        left, bottom, right, top = place
        offset = ((left + right) / 2 - anchor[0], (bottom + top) / 2 - anchor[1])
        leader = {"arrowstyle": "-", "color": "#a0aec0", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=_SIZE,
            color=label.color,
            arrowprops=leader if gap >= _FAR else None,
        ).set_in_layout(False)


class _Page:
    """Lengths and places in points."""

    def __init__(self, figure: Figure, axes: Axes):
        self._figure, self._axes = figure, axes
        self._scale = _POINTS_AN_INCH / figure.dpi
        left, bottom, right, top = (edge * self._scale for edge in axes.bbox.extents)
        self.frame: Box = (left + _EDGE, bottom + _EDGE, right - _EDGE, top - _EDGE)

    def point(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._axes.transData.transform((x, y)) * self._scale
        return across, up

    def line(self, line: Line) -> Box:
        (x0, y0), (x1, y1) = (self.point(*end) for end in line)
        return (min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1)

    def size(self, text: str) -> tuple[float, float]:
        sample = self._figure.text(0, 0, text, fontsize=_SIZE)
        box = sample.get_window_extent()
        sample.remove()
        return box.width * self._scale + 2, box.height * self._scale


def _places(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float]],
    page: _Page,
    lines: Sequence[Line],
) -> list[tuple[Box, float]]:
    """A box and its gap from the point for each anchor: the cheapest in turn, then again with all others in place."""
    points = [(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in marks]
    crossed = list(map(page.line, lines))
    chosen: list[tuple[Box, float] | None] = [None] * len(anchors)

    def cost(candidate: tuple[Box, float], others: Sequence[Box]) -> float:
        box, gap = candidate
        outside = _area(box) - _overlap(box, page.frame)
        covered = sum(_overlap(box, other) for other in (*others, *points))
        return gap + 10 * (outside + covered) + 0.5 * sum(_overlap(box, line) for line in crossed)

    for _, index in product(range(_ROUNDS), range(len(anchors))):
        others = [place[0] for number, place in enumerate(chosen) if place is not None and number != index]
        chosen[index] = min(_candidates(anchors[index], sizes[index]), key=lambda place: cost(place, others))
    return [place for place in chosen if place is not None]


def _candidates(anchor: tuple[float, float], size: tuple[float, float]) -> Iterator[tuple[Box, float]]:
    half_width, half_height = size[0] / 2, size[1] / 2
    for gap, angle in product(_GAPS, _ANGLES):
        across, up = cos(radians(angle)), sin(radians(angle))
        x = anchor[0] + across * (gap + _POINT + half_width)
        y = anchor[1] + up * (gap + _POINT + half_height)
        yield (x - half_width, y - half_height, x + half_width, y + half_height), gap


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
