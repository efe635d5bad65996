"""The frontier: time over memory, one point a mode, so that one sees what a byte of memory costs in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from textwrap import wrap

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lowtide.bench.batch_plot import batch_drawings
from lowtide.bench.describe import distinct_names, facets
from lowtide.bench.labels import Label, Line, put_labels
from lowtide.bench.marks import DARK, FRONTIER, GREY, legend, style
from lowtide.bench.outcome import GIB
from lowtide.bench.picture import Picture, svg_of
from lowtide.bench.report import Cell, Column, Matrix, Report

_PANEL_INCHES = (6.0, 4.3)
_CHARACTERS_AN_INCH = 12  # of a title
_LEGEND_ENTRY_INCHES = 2.4
_MILLISECONDS_BELOW_S = 2.0


@dataclass(frozen=True)
class Panel:
    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Sheet:
    """What stands in one drawing.

    section: see ``Picture``.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    section: str | None = None


def plots(report: Report) -> list[Picture]:
    """Every plot of a report, each with a name of its own."""
    with matplotlib.rc_context({"text.parse_math": False}):  # a name with dollars is no formula
        found = [Picture(sheet.name, sheet.title, sheet.section, svg_of(draw(sheet))) for sheet in sheets(report)]
        for matrix, scaling, drawing in batch_drawings(report):
            title = f"Batch scaling, {matrix.title}: {scaling.title}"
            found.append(Picture(f"batch-{matrix.name}", title, matrix.name, svg_of(drawing)))
    names = distinct_names(picture.name for picture in found)
    return [replace(picture, name=name) for picture, name in zip(found, names, strict=True)]


def sheets(report: Report) -> Iterator[Sheet]:
    """Synthetic works: one sheet a condition, with a panel a shape. Families: one sheet each, a panel a condition.

    Cells without figures, and inert ones, are not in them, nor is what was measured on a CPU; a panel without a
    frontier (one point, or one that is the best in both) is left out, and a sheet without panels.
    """
    on_cards = [matrix for matrix in report.matrices if not matrix.on_cpu]
    for sheet in (*_synthetic(on_cards), *_families(on_cards)):
        if sheet.panels:
            yield sheet


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (memory, time) to which no other is at least equal in both and better in one; by memory."""
    best: list[tuple[float, float]] = []
    for memory, time in sorted(set(points)):
        if not best or time < best[-1][1]:
            best.append((memory, time))
    return best


def draw(sheet: Sheet) -> Figure:
    """The drawing of a sheet, complete with its one legend."""
    columns = min(len(sheet.panels), 2)
    rows = ceil(len(sheet.panels) / columns)
    width, height = _PANEL_INCHES
    drawing = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(sheet.panels) :]:
        axes.remove()
    drawn = [_fill(axes, panel) for axes, panel in zip(grid, sheet.panels, strict=False)]
    drawing.suptitle("\n".join(wrap(sheet.title, round(_CHARACTERS_AN_INCH * width * columns))), fontsize=11)
    entries = legend(cell.mode for panel in sheet.panels for cell in panel.cells)
    across = max(1, int(width * columns / _LEGEND_ENTRY_INCHES))
    drawing.legend(handles=entries, loc="outside lower center", ncols=across, frameon=False, fontsize=9)
    drawing.draw_without_rendering()
    drawing.set_layout_engine("none")  # names stand where the layout is now
    for filled in drawn:
        put_labels(drawing, filled.axes, filled.labels, filled.lines, filled.points)
    return drawing


@dataclass(frozen=True)
class _Filled:
    """Axes with points in them. labels: the names to write; lines, points: what these should not cover."""

    axes: Axes
    labels: list[Label]
    lines: list[Line]
    points: list[tuple[float, float]]


def _synthetic(matrices: Sequence[Matrix]) -> Iterator[Sheet]:
    by_setting: dict[str, list[Panel]] = {}
    for matrix in matrices:
        for column in matrix.columns if matrix.condition.kind == "synthetic" else ():
            tiny = ["tiny"] * (column.condition.size == "tiny")
            setting = ", ".join([*facets(column.condition, column.card).values(), *tiny])
            by_setting.setdefault(setting, []).extend(_panels(column, matrix.title))
    for setting, panels in by_setting.items():
        yield Sheet(f"frontier-synthetic-{setting.replace(', ', '-')}", f"Synthetic blocks: {setting}", tuple(panels))


def _families(matrices: Sequence[Matrix]) -> Iterator[Sheet]:
    for matrix in matrices:
        if matrix.condition.kind == "family":
            alone = len(matrix.columns) == 1
            panels = (panel for column in matrix.columns for panel in _panels(column, "" if alone else column.title))
            title = f"{matrix.title}: {matrix.common}"
            yield Sheet(f"frontier-{matrix.name}", title, tuple(panels), section=matrix.name)


def _panels(column: Column, title: str) -> Iterator[Panel]:
    cells = tuple(cell for cell in column.cells if cell.result)
    if len(pareto([(outcome.peak_bytes, outcome.step_s) for cell in cells if (outcome := cell.result)])) > 1:
        yield Panel(title, cells)


def _fill(axes: Axes, panel: Panel) -> _Filled:
    """The points, how far their steps reach, and the frontier."""
    results = [(cell, cell.result) for cell in panel.cells if cell.result]
    slowest_s = max(outcome.step_s for _, outcome in results)
    unit, factor = ("ms", 1000) if slowest_s < _MILLISECONDS_BELOW_S else ("s", 1)
    points = [(outcome.peak_bytes / GIB, outcome.step_s * factor) for _, outcome in results]
    best = pareto(points)
    corners = _steps(best)
    axes.plot(*zip(*corners, strict=True), color=FRONTIER, linewidth=1.6, zorder=1)
    lines: list[Line] = [*pairwise(corners)]
    for (cell, outcome), (x, y) in zip(results, points, strict=True):
        fastest, slowest = (time_s * factor for time_s in outcome.range_s)
        lines.append(((x, fastest), (x, slowest)))
        _mark(axes, cell.mode, (x, y), (fastest, slowest))
    _dress(axes, panel.title, f"{unit} per step")
    labels = [
        Label(_name(cell), *place, DARK if place in best else GREY)
        for (cell, _), place in zip(results, points, strict=True)
    ]
    return _Filled(axes, labels, lines, points)


def _mark(axes: Axes, mode: str, place: tuple[float, float], reach: tuple[float, float]) -> None:
    look = style(mode)
    axes.vlines(place[0], *reach, color=look.color, linewidth=0.9, alpha=0.7, zorder=2)
    marker = {"marker": look.marker, "markersize": look.size, "markeredgecolor": "white"}
    axes.plot(*place, linestyle="", color=look.color, zorder=4 if look.ours else 3, **marker)


def _dress(axes: Axes, title: str, times: str) -> None:
    axes.margins(0.16)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("peak of allocated memory, GiB")
    axes.set_ylabel(times)
    axes.grid(color="#edf2f7")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _steps(best: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the staircase over the best points: with more memory, the time of the last one still."""
    corners = [best[0]]
    for x, y in best[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


def _name(cell: Cell) -> str:
    """The mode; a question mark where its runs do not agree."""
    disagree = cell.outcome is not None and cell.outcome.disagreements()
    return f"{cell.mode} (?)" if disagree else cell.mode
