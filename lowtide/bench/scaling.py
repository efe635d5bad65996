"""Batch scaling: what samples a second and peak memory do as the batch grows, where records differ in nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.bench.describe import facets, sizes_of
from lowtide.bench.outcome import GIB, Outcome
from lowtide.bench.report import Cell, Column, Matrix

BATCH = "B"
EXPLAINED = "Batch scaling: samples per second / peak GiB; the most samples per second of a mode are in bold."


@dataclass(frozen=True)
class Row:
    """A mode, with a cell for each batch."""

    mode: str
    batches: tuple[int, ...]
    cells: tuple[Cell, ...]

    @property
    def points(self) -> list[tuple[int, Outcome]]:
        """The results, by batch."""
        found = zip(self.batches, self.cells, strict=True)
        return [(batch, cell.result) for batch, cell in found if cell.result]

    @property
    def best(self) -> int | None:
        """The batch with the most samples a second, the smallest of several."""
        rates = {batch: samples_per_s(outcome, batch) for batch, outcome in self.points}
        return max(rates, key=rates.__getitem__) if rates else None

    @property
    def texts(self) -> list[tuple[str, bool]]:
        """For each batch ``"5.33 / 8.00"`` or the state, and whether it is the best."""
        best, found = self.best, zip(self.batches, self.cells, strict=True)
        return [(_in_words(cell, batch), batch == best) for batch, cell in found]


@dataclass(frozen=True)
class Scaling:
    """One condition but for the batch. title: it in words; the same for no other scaling of its matrix."""

    title: str
    batches: tuple[int, ...]
    rows: tuple[Row, ...]


def scalings(matrix: Matrix) -> Iterator[Scaling]:
    """One for each group of columns that differ in the batch alone."""
    groups: dict[tuple[str, str], dict[int, Column]] = {}
    for column in matrix.columns:
        sizes = sizes_of(column.condition)
        alike = replace(column.condition, sizes={**sizes, BATCH: 0})
        groups.setdefault((alike.key, column.card), {})[sizes.get(BATCH, 1)] = column
    for columns in groups.values():
        if len(columns) > 1:
            yield _scaling(dict(sorted(columns.items())), matrix.modes)


def samples_per_s(outcome: Outcome, batch: int) -> float:
    return batch / outcome.step_s


def _scaling(columns: dict[int, Column], modes: Sequence[str]) -> Scaling:
    batches = tuple(columns)
    cells = zip(*(column.cells for column in columns.values()), strict=True)
    rows = [Row(mode, batches, found) for mode, found in zip(modes, cells, strict=True)]
    first = columns[batches[0]]
    words = {name: text for name, text in facets(first.condition, first.card).items() if name != BATCH}
    run = tuple(row for row in rows if any(cell.outcome for cell in row.cells))
    return Scaling(", ".join(words.values()), batches, run)


def _in_words(cell: Cell, batch: int) -> str:
    if cell.result is None:
        return cell.in_short
    return f"{samples_per_s(cell.result, batch):.3g} / {cell.result.peak_bytes / GIB:.2f}"
