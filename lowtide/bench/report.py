"""What a report contains: a matrix of modes and conditions for each work, with the public figures beside our own.

``markdown`` and ``html`` lay it out, ``plot`` draws it; what a cell says is decided and worded here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowtide.bench.describe import facets, ordered_modes, work_order, work_title
from lowtide.bench.machines import Machine, machines
from lowtide.bench.outcome import NOT_RUN, Outcome, Verdict, outcomes, peaks_differ
from lowtide.bench.record import Condition, Record
from lowtide.bench.reference import Published, Reference, differences, published, references, source

NO_REFERENCE = "no reference"
TORCH = "torch-checkpoint"
_ADAPTERS = ("frozen", "lora", "full")
_WITHOUT_OFFLOAD = {
    "activation-offload": "none",
    "unsloth-ffn": "ffn",
    "layer-offload": "layer",
    "unsloth": "layer",
    "seg2-stride4-offload": "seg2-stride4",
    "selective-offload": "selective",
}
LEGEND = (
    "A cell: seconds per step / peak GiB of allocated memory, both over the steps after warm-up; then its time as a "
    "multiple of mode none's and of torch's own checkpoint's (× torch) under the same condition; then, in italics, the "
    "public figures for the same work, mode and precision, each with its card, or 'no reference'. OOM: the device's "
    "memory ran out. failed: no countable step was reached. unsupported: this model cannot run the mode. not run: not "
    "asked for. inert: an option changed nothing in the measured steps, so the cell is no result of its mode; its "
    "figures are left out. Weights are random: time and memory do not depend on their values, and nothing here speaks "
    "of what a model learns."
)


@dataclass(frozen=True)
class Cell:
    """One mode under one condition. outcome: None where it was not run. remarks: what a reader must know of it.

    x_none, x_torch: its time as a multiple of theirs, where both are results.
    """

    mode: str
    outcome: Outcome | None
    references: tuple[Reference, ...]
    x_none: float | None = None
    x_torch: float | None = None
    remarks: tuple[str, ...] = ()

    @property
    def state(self) -> Verdict | Literal["not run"]:
        return self.outcome.state if self.outcome else NOT_RUN

    @property
    def result(self) -> Outcome | None:
        """The outcome, if it is one of this mode: it has figures and is not inert."""
        return self.outcome if self.state == "ok" else None

    @property
    def headline(self) -> str:
        """``"0.0948 / 7.43"``, or the state and why."""
        return self.outcome.in_words if self.outcome else NOT_RUN

    @property
    def ratios(self) -> str:
        """``"1.30 × none · 0.99 × torch"``; empty where there is nothing to compare with."""
        both = ((self.x_none, "none"), (self.x_torch, "torch"))
        return " · ".join(f"{ratio:.2f} × {name}" for ratio, name in both if ratio is not None)

    @property
    def reference(self) -> str:
        """``"H100 0.721 / 7.67 (1.36 × none); L40S OOM"``, or ``"no reference"``."""
        return "; ".join(map(_reference_in_words, self.references)) or NO_REFERENCE


@dataclass(frozen=True)
class Column:
    """One condition on one card: a cell for every mode of the matrix.

    title: what tells it from the other columns of its matrix. differs: in what the published figures' condition is
    another one.
    """

    condition: Condition
    card: str
    title: str
    differs: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Matrix:
    """Everything about one work. common: what holds for all columns. truncated: the model was cut to some blocks."""

    condition: Condition
    title: str
    common: str
    modes: tuple[str, ...]
    columns: tuple[Column, ...]
    published: Published | None

    @property
    def rows(self) -> list[tuple[str, tuple[Cell, ...]]]:
        """Each mode with its cells, column by column."""
        return list(zip(self.modes, zip(*(column.cells for column in self.columns), strict=True), strict=True))

    @property
    def truncated(self) -> bool:
        return bool(self.condition.depth)

    @property
    def name(self) -> str:
        """For files and anchors."""
        cut = [f"{stack}-{blocks}" for stack, blocks in self.condition.depth.items()]
        text = "-".join([self.condition.work, *cut])
        return "".join(char if char.isalnum() or char in "_-" else "-" for char in text)


@dataclass(frozen=True)
class Report:
    """sources: of the public figures that stand in it."""

    matrices: tuple[Matrix, ...]
    machines: tuple[Machine, ...]
    sources: tuple[str, ...]

    @property
    def cells(self) -> list[Cell]:
        return [cell for matrix in self.matrices for column in matrix.columns for cell in column.cells]


def build_report(records: Iterable[Record]) -> Report:
    """The report over all records that are given."""
    records = list(records)
    by_work: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes(records):
        condition = outcome.condition
        key = (condition.kind, condition.work, tuple(sorted(condition.depth.items())))
        by_work.setdefault(key, []).append(outcome)
    matrices = sorted(map(_matrix, by_work.values()), key=lambda matrix: (work_order(matrix.condition), matrix.name))
    kinds = dict.fromkeys(matrix.condition.kind for matrix in matrices if matrix.published)
    return Report(tuple(matrices), machines(records), tuple(map(source, kinds)))


def _matrix(found: Sequence[Outcome]) -> Matrix:
    by_column: dict[tuple[str, str], dict[str, Outcome]] = {}
    for outcome in found:
        key = (replace(outcome.condition, mode="").key, outcome.card)
        by_column.setdefault(key, {})[outcome.condition.mode] = outcome
    condition = replace(found[0].condition, mode="")
    modes = ordered_modes((outcome.condition.mode for outcome in found), condition.kind)
    groups = sorted(by_column.values(), key=_column_order)
    titles, common = _titles(groups)
    columns = tuple(_column(group, title, modes) for group, title in zip(groups, titles, strict=True))
    return Matrix(condition, work_title(condition), common, modes, columns, published(condition))


def _column_order(group: Mapping[str, Outcome]) -> tuple[Any, ...]:
    outcome = next(iter(group.values()))
    condition = outcome.condition
    place = _ADAPTERS.index(condition.adapter) if condition.adapter in _ADAPTERS else len(_ADAPTERS)
    what = (condition.precision, place, condition.rank or 0, condition.compile, condition.attention)
    return (outcome.card, *what, sorted(condition.sizes.items()))


def _titles(groups: Sequence[Mapping[str, Outcome]]) -> tuple[list[str], str]:
    """What tells columns apart, and what is the same in all of them."""
    firsts = [next(iter(group.values())) for group in groups]
    parts = [facets(outcome.condition, outcome.card) for outcome in firsts]
    names = list(dict.fromkeys(name for part in parts for name in part))
    varying = [name for name in names if len({part.get(name) for part in parts}) > 1]
    common = ", ".join(parts[0][name] for name in names if name not in varying)
    titles = [", ".join(part[name] for name in varying if name in part) for part in parts]
    return [title or "s/step / GiB" for title in titles], common


def _column(group: Mapping[str, Outcome], title: str, modes: Sequence[str]) -> Column:
    first = next(iter(group.values()))
    condition = replace(first.condition, mode="")
    cells = tuple(_cell(mode, group, condition) for mode in modes)
    differs = differences(condition) if any(cell.references for cell in cells) else ()
    return Column(condition, first.card, title, tuple(differs), cells)


def _cell(mode: str, group: Mapping[str, Outcome], condition: Condition) -> Cell:
    outcome = group.get(mode)
    cell = Cell(mode, outcome, references(replace(condition, mode=mode)))
    if outcome is None:
        return cell
    remarks = [f"runs disagree in {what}" for what in outcome.disagreements()]
    if cell.result is None:
        return replace(cell, remarks=tuple(remarks))
    none, torch = (_ratio(outcome, group.get(other)) for other in ("none", TORCH))
    remarks += _no_gain(mode, group, condition)
    return replace(cell, x_none=none, x_torch=torch, remarks=tuple(remarks))


def _ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None or other is outcome or other.state != "ok":
        return None
    return outcome.step_s / other.step_s


def _no_gain(mode: str, group: Mapping[str, Outcome], condition: Condition) -> Iterator[str]:
    """Where a mode's peak is not below that of the mode it should improve on, something else makes the peak."""
    other = _WITHOUT_OFFLOAD.get(mode, "none")
    ours, theirs = group[mode], group.get(other)
    if mode == "none" or theirs is None or theirs.state != "ok":
        return
    if ours.peak_bytes >= theirs.peak_bytes or not peaks_differ(ours.peak_bytes, theirs.peak_bytes):
        why = ": weights, gradients and optimizer states make it" if condition.adapter == "full" else ""
        yield f"peak is not below {other}'s{why}"


def _reference_in_words(reference: Reference) -> str:
    if reference.step_s is None or reference.peak_gib is None:
        return f"{reference.card} {reference.state}"
    more = [f"{reference.x_none:.2f} × none"] if reference.x_none else []
    more += [f"same peak as {reference.same_peak_as}"] if reference.same_peak_as else []
    return f"{reference.card} {reference.step_s:g} / {reference.peak_gib:.2f}" + (
        f" ({', '.join(more)})" if more else ""
    )
