"""Batch scaling as a drawing: samples a second and peak memory over the batch, a line a mode."""

from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lowtide.bench.marks import style
from lowtide.bench.outcome import GIB
from lowtide.bench.report import Matrix, Report
from lowtide.bench.scaling import Row, Scaling, samples_per_s, scalings

_INCHES = (9.4, 4.2)
_COLORS = matplotlib.color_sequences["tab20"]


def batch_drawings(report: Report) -> Iterator[tuple[Matrix, Scaling, Figure]]:
    """One for each batch scaling in which a mode has results of several batches; of what a CPU measured, none."""
    for matrix in report.matrices:
        for scaling in () if matrix.on_cpu else scalings(matrix):
            rows = [row for row in scaling.rows if len(row.points) > 1]
            if rows:
                yield matrix, scaling, _drawn(matrix.title, scaling, rows)


def _drawn(work: str, scaling: Scaling, rows: Sequence[Row]) -> Figure:
    drawing = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(drawing)
    rates, peaks = drawing.subplots(1, 2)
    _fill(rates, peaks, rows)
    _dress(rates, "samples per second", scaling.batches)
    _dress(peaks, "peak of allocated memory, GiB", scaling.batches)
    drawing.suptitle(f"{work}\n{scaling.title}", fontsize=10)
    drawing.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    return drawing


def _fill(rates: Axes, peaks: Axes, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        look = {"color": _COLORS[number % len(_COLORS)], "marker": style(row.mode).marker, "linewidth": 1.4}
        batches = [batch for batch, _ in row.points]
        rates.plot(batches, [samples_per_s(outcome, batch) for batch, outcome in row.points], label=row.mode, **look)
        peaks.plot(batches, [outcome.peak_bytes / GIB for _, outcome in row.points], **look)


def _dress(axes: Axes, quantity: str, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel(quantity)
    axes.grid(color="#edf2f7")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
