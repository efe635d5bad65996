"""Time over memory of what benchmarks/offload.py measured: the last run of each work, ratios to its own `none`.

Run: python benchmarks/plots/offload.py
Reads benchmarks/results/offload.jsonl, writes docs/images/offload.svg.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lowtide.bench.labels import Label, put_labels
from lowtide.bench.plot import pareto

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "offload.jsonl"
IMAGE = ROOT / "docs" / "images" / "offload.svg"

WORKS = {
    "wan": "Wan 2.1 1.3B, 832×480, 81 frames",
    "flux": "Flux.1, 1024²",
    "sd3": "SD3 medium, 1024², batch 4",
    "16x16384": "16 synthetic blocks × 16384 tokens",
}
THEIRS = {"none": ("nothing", "*", "#1a202c", 12.0), "torch-checkpoint": ("torch's checkpoint", "s", "#ed8936", 9.0)}
OURS = ("lowtide", "o", "#2b6cb0", 7.0)
MIXED = "a schedule of its own"


def measured() -> dict[str, dict[str, Any]]:
    """The last line of each work."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {line["work"]: line for line in lines}


def name_of(mode: str) -> str:
    return MIXED if ";" in mode else mode


def panel(axes: Axes, title: str, rows: dict[str, Any]) -> tuple[Axes, list[Label], Any]:
    """One work: a point a mode, the frontier through the best."""
    points = {name_of(mode): (row["peak_gib"], row["x_none"]) for mode, row in rows.items() if "error" not in row}
    best = pareto(list(points.values()))
    corners = [best[0]]
    for x, y in best[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    axes.plot(*zip(*corners, strict=True), color="#90cdf4", linewidth=1.6, zorder=1)
    for mode, place in points.items():
        _, marker, color, size = THEIRS.get(mode, OURS)
        axes.plot(*place, marker, color=color, markersize=size, markeredgecolor="white", zorder=3)
    axes.margins(0.2)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("peak of allocated memory, GiB")
    axes.set_ylabel("time of a step, nothing = 1")
    axes.grid(color="#edf2f7", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    labels = [
        Label(THEIRS[mode][0] if mode in THEIRS else mode, *place, "#1a202c" if place in best else "#718096")
        for mode, place in points.items()
    ]
    return axes, labels, [*pairwise(corners)]


def main() -> None:
    found = measured()
    drawing = Figure(figsize=(11, 7.6), layout="constrained")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(2, 2).flatten()
    panels = [panel(axes, title, found[work]["rows"]) for axes, (work, title) in zip(grid, WORKS.items(), strict=True)]
    marks = [
        Line2D([], [], linestyle="", marker=marker, color=color, markersize=size, label=label)
        for label, marker, color, size in (*THEIRS.values(), OURS)
    ]
    drawing.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    drawing.draw_without_rendering()
    for axes, labels, lines in panels:
        put_labels(drawing, axes, labels, lines)
    with matplotlib.rc_context({"svg.hashsalt": "lowtide"}):
        drawing.savefig(IMAGE, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
