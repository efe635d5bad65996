"""The frontier: time over memory, one point a mode, so that one sees what a byte of memory costs in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from math import ceil
from textwrap import wrap

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lowtide.bench.describe import facets
from lowtide.bench.labels import Label, Line, put_labels
from lowtide.bench.outcome import GIB, Outcome
from lowtide.bench.report import Cell, Column, Matrix, Report

_PANEL_INCHES = (6.0, 4.3)
_TITLE_CHARACTERS = 70  # that fit above one panel
_MILLISECONDS_BELOW_S = 2.0
_DARK, _GREY = "#1a202c", "#718096"


@dataclass(frozen=True)
class _Style:
    label: str
    marker: str
    color: str
    size: float


_OURS = _Style("lowtide", "o", "#2b6cb0", 6.5)
_THEIRS = {
    "none": _Style("nothing recomputed", "*", "#1a202c", 12),
    "torch-checkpoint": _Style("torch's own checkpoint", "s", "#ed8936", 10.5),
    "diffusers": _Style("diffusers' own checkpointing", "D", "#48bb78", 9.5),
}


@dataclass(frozen=True)
class Plot:
    """name: for a file. svg: the whole drawing; its text is drawn, so that it needs no font."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True)
class Panel:
    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Sheet:
    """What stands in one drawing."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def plots(report: Report) -> list[Plot]:
    """Every plot of a report."""
    return [Plot(sheet.name, sheet.title, _svg(draw(sheet))) for sheet in sheets(report)]


def sheets(report: Report) -> Iterator[Sheet]:
    """Synthetic works: one sheet a condition, with a panel a shape. Families: one sheet each, a panel a condition.

    Cells without figures, and inert ones, are not in them; what has none at all is left out.
    """
    for sheet in (*_synthetic(report.matrices), *_families(report.matrices)):
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
    panels = sheet.panels
    columns = min(len(panels), 2)
    rows = ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    drawing = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(rows, columns, squeeze=False).flatten()
    used = list(zip(grid, panels, strict=False))
    for axes in grid[len(panels) :]:
        axes.remove()
    drawn = [(axes, *_fill(axes, panel)) for axes, panel in used]
    drawing.suptitle("\n".join(wrap(sheet.title, _TITLE_CHARACTERS * columns)), fontsize=11)
    drawing.legend(handles=_legend(panels), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    drawing.draw_without_rendering()
    for axes, labels, lines in drawn:
        put_labels(drawing, axes, labels, lines)
    return drawing


def _synthetic(matrices: Sequence[Matrix]) -> Iterator[Sheet]:
    by_setting: dict[str, list[Panel]] = {}
    for matrix in matrices:
        for column in matrix.columns if matrix.condition.kind == "synthetic" else ():
            setting = ", ".join(facets(column.condition, column.card).values())
            by_setting.setdefault(setting, []).extend(_panels(column, matrix.title))
    for setting, panels in by_setting.items():
        name = "".join(char if char.isalnum() else "-" for char in setting.replace(", ", " "))
        yield Sheet(f"frontier-synthetic-{name}", f"Synthetic blocks: {setting}", tuple(panels))


def _families(matrices: Sequence[Matrix]) -> Iterator[Sheet]:
    for matrix in matrices:
        if matrix.condition.kind == "family":
            alone = len(matrix.columns) == 1
            panels = (panel for column in matrix.columns for panel in _panels(column, "" if alone else column.title))
            yield Sheet(f"frontier-{matrix.name}", f"{matrix.title}: {matrix.common}", tuple(panels))


def _panels(column: Column, title: str) -> Iterator[Panel]:
    cells = tuple(cell for cell in column.cells if cell.result)
    if cells:
        yield Panel(title, cells)


def _fill(axes: Axes, panel: Panel) -> tuple[list[Label], list[Line]]:
    """The points and the frontier; the names that belong to them, and the lines that names should not cover."""
    results = [(cell, cell.result) for cell in panel.cells if cell.result]
    slowest_s = max(outcome.step_s for _, outcome in results)
    unit, factor = ("ms", 1000) if slowest_s < _MILLISECONDS_BELOW_S else ("s", 1)
    points = [(outcome.peak_bytes / GIB, outcome.step_s * factor) for _, outcome in results]
    best = pareto(points)
    corners = _steps(best)
    axes.plot(*zip(*corners, strict=True), color="#90cdf4", linewidth=1.6, zorder=1)
    lines: list[Line] = [*pairwise(corners)]
    for (cell, outcome), (x, y) in zip(results, points, strict=True):
        style = _THEIRS.get(cell.mode, _OURS)
        fastest, slowest = (time_s * factor for time_s in _range_s(outcome))
        axes.vlines(x, fastest, slowest, color=style.color, linewidth=0.9, alpha=0.7, zorder=2)
        axes.plot(
            x,
            y,
            style.marker,
            color=style.color,
            markersize=style.size,
            markeredgecolor="white",
            zorder=4 if style is _OURS else 3,
        )
        lines.append(((x, fastest), (x, slowest)))
    _dress(axes, panel.title, f"{unit} per step")
    names = [
        (_name(cell), place, _DARK if place in best else _GREY)
        for (cell, _), place in zip(results, points, strict=True)
    ]
    return [Label(name, *place, color) for name, place, color in names], lines


def _dress(axes: Axes, title: str, times: str) -> None:
    axes.margins(0.16)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("peak of allocated memory, GiB")
    axes.set_ylabel(times)
    axes.grid(color="#edf2f7", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _steps(best: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the staircase over the best points: with more memory, the time of the last one still."""
    corners = [best[0]]
    for x, y in best[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


def _range_s(outcome: Outcome) -> tuple[float, float]:
    times_s = [time_s for run in outcome.figures for time_s in run.step_times_s]
    return min(times_s), max(times_s)


def _name(cell: Cell) -> str:
    """The mode; a question mark where its runs do not agree."""
    disagree = cell.outcome is not None and cell.outcome.disagreements()
    return f"{cell.mode} (?)" if disagree else cell.mode


def _legend(panels: Sequence[Panel]) -> list[Line2D]:
    modes = {cell.mode for panel in panels for cell in panel.cells}
    styles = [style for mode, style in _THEIRS.items() if mode in modes]
    styles += [_OURS] if modes - set(_THEIRS) else []
    marks = [
        Line2D([], [], linestyle="", marker=s.marker, color=s.color, markersize=s.size, label=s.label) for s in styles
    ]
    return [*marks, Line2D([], [], color="#90cdf4", linewidth=1.6, label="Pareto frontier")]


def _svg(drawing: Figure) -> str:
    """The same text for the same report: no date, and names of parts that do not change."""
    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "lowtide"}):
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode()
