"""The head of a report: a line a condition, so that one finds a work and sees at once what memory costs there."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.bench.describe import facets, told_apart
from lowtide.bench.outcome import GIB, NOT_RUN, Outcome, peaks_differ, seconds
from lowtide.bench.report import Cell, Column, Matrix, Report

SHARES = (0.7, 0.5)
NOTHING = "–"
SAME = "same"
NONE_IS_LEAST = "none is the least"
HEADS = (
    "work",
    "condition",
    "none",
    *(f"fastest within {share:.0%} of none's peak" for share in SHARES),
    "least memory",
    "results",
)
EXPLAINED = (
    "Figures are s/step / peak GiB, in brackets the time as a multiple of none's. Results: cells with figures that "
    "count, of the cells that were run. Of modes whose peaks are the same within 1 %, the fastest stands for the least "
    f"memory. '{SAME}': the cell to the left once more. '{NONE_IS_LEAST}': no mode's peak is below none's."
)


@dataclass(frozen=True)
class Entry:
    """title, name: of the matrix that it leads to. cells: the texts of ``HEADS`` after the work."""

    title: str
    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """common: what holds for every line."""

    common: str
    entries: tuple[Entry, ...]


def index(report: Report) -> Index:
    """A line for each column of each matrix, in their order; those of a matrix that have no result come last."""
    found = [(matrix, column) for matrix in report.matrices for column in sorted(matrix.columns, key=_has_none)]
    conditions, common = told_apart([facets(column.condition, column.card) for _, column in found])
    entries = [_entry(*place, condition) for place, condition in zip(found, conditions, strict=True)]
    return Index(common, tuple(entries))


def _has_none(column: Column) -> bool:
    return not any(cell.result for cell in column.cells)


def _entry(matrix: Matrix, column: Column, condition: str) -> Entry:
    results = [(cell, cell.result) for cell in column.cells if cell.result]
    run = sum(cell.outcome is not None for cell in column.cells)
    none = next((cell for cell in column.cells if cell.mode == "none"), None)
    best = [NOTHING] * (len(SHARES) + 1) if matrix.on_cpu else _told_once(list(_best(results, none)))
    headline = " ".join(filter(None, (none.in_short, none.reserved and f"({none.reserved})"))) if none else NOT_RUN
    return Entry(matrix.title, matrix.name, (condition, headline, *best, f"{len(results)} of {run}"))


def _best(results: Sequence[tuple[Cell, Outcome]], none: Cell | None) -> Iterator[str]:
    """The fastest of the modes within each share of none's peak, then that of those with the lowest peak."""
    others = [(cell, outcome) for cell, outcome in results if cell.mode != "none"]
    for share in SHARES:
        most_bytes = share * none.result.peak_bytes if none and none.result else 0
        yield _fastest([place for place in others if place[1].peak_bytes <= most_bytes])
    least_bytes = min((outcome.peak_bytes for _, outcome in others), default=math.inf)
    if none and none.result and not _below(least_bytes, none.result.peak_bytes):
        yield NONE_IS_LEAST
    else:
        yield _fastest([place for place in others if not peaks_differ(place[1].peak_bytes, least_bytes)])


def _below(size_bytes: float, other_bytes: float) -> bool:
    return size_bytes < other_bytes and peaks_differ(size_bytes, other_bytes)


def _told_once(texts: Sequence[str]) -> list[str]:
    """What stands to the left already is not said again."""
    return [SAME if text == left != NOTHING else text for text, left in zip(texts, [NOTHING, *texts], strict=False)]


def _fastest(found: Sequence[tuple[Cell, Outcome]]) -> str:
    return _in_words(*min(found, key=lambda place: place[1].step_s)) if found else NOTHING


def _in_words(cell: Cell, outcome: Outcome) -> str:
    """``"layer 0.7500 / 8.00 (1.50 ×, 9.20 reserved)"``."""
    notes = ", ".join(filter(None, (f"{cell.x_none:.2f} ×" if cell.x_none else "", cell.reserved)))
    return f"{cell.mode} {seconds(outcome.step_s)} / {outcome.peak_bytes / GIB:.2f}" + (f" ({notes})" if notes else "")
