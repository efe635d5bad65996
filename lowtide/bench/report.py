"""What a report contains: a matrix of modes and conditions for each work, with the public figures beside our own.

``index`` and ``scaling`` put its figures together otherwise, ``markdown`` and ``html`` lay it out, ``plot`` draws it;
what a cell says is decided and worded here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowtide.bench.describe import (
    MODES,
    distinct_names,
    facets,
    mode_title,
    ordered_modes,
    plans,
    told_apart,
    work_order,
    work_title,
)
from lowtide.bench.machines import Machine, machines
from lowtide.bench.outcome import FEW_STEPS, NOT_RUN, Outcome, Verdict, outcomes, peaks_differ
from lowtide.bench.record import Condition, Record
from lowtide.bench.reference import (
    Published,
    Reference,
    differences,
    incomparable,
    published,
    references,
    source,
)

NO_REFERENCE = "no reference"
TORCH = "torch-checkpoint"
_ADAPTERS = ("frozen", "lora", "full")
_WITHOUT_OFFLOAD = {
    "activation-offload": "none",
    "unsloth-ffn": "ffn",
    "unsloth-ffn-offload": "ffn",
    "layer-offload": "layer",
    "unsloth": "layer",
    "seg2-stride4-offload": "seg2-stride4",
    "selective-offload": "selective",
}
LEGEND = {
    "A cell": "median seconds per step / peak GiB of allocated memory, both over the steps after warm-up, of which "
    "each cell's details tell how many there were",
    "reserved": (
        "GiB that PyTorch reserved, where that is over 5 % more than was allocated; budgets are of reserved memory"
    ),
    "steps": (
        "how many were counted, from the fastest to the slowest ('only' where they are fewer than "
        f"{FEW_STEPS}: no firm figure)"
    ),
    "× none, × torch": "its time as a multiple of mode none's, and of torch's own checkpoint's, in the same condition",
    "In italics": "public figures for the same work, mode and precision, each with its card, or 'no reference'",
    "auto (12 GiB)": "what auto settled on where PyTorch may reserve 12 GiB",
    "OOM": "the device's memory, or auto's budget, ran out",
    "failed": "no countable step was reached",
    "unsupported": "this model cannot run the mode, or no schedule fits in auto's budget",
    "not run": "not asked for",
    "inert": (
        "an option changed nothing in the measured steps: the cell is no result of its mode, its figures are left out"
    ),
    "Weights": "random: time and memory do not depend on their values, and nothing here speaks of what a model learns",
}
"""What stands in a report, term by term."""
ON_CPU = (
    "Measured on a CPU: offload is simulated by copies within CPU memory, and the peak is that of the process. Such "
    "figures are for trying a benchmark out; they say nothing of a card, and stand in no plot."
)
TRUNCATED = (
    "Truncated model: its figures are not those of the whole one. Hold them to each other, and to no public figure."
)


@dataclass(frozen=True)
class Cell:
    """One mode, by its title (``describe.mode_title``), under one condition.

    outcome: None where it was not run. remarks: what a reader must know of it. why_no_reference:
    where public figures could not stand beside it at all. x_none, x_torch: its time as a multiple of theirs, where both
    are results.
    """

    mode: str
    outcome: Outcome | None
    references: tuple[Reference, ...]
    why_no_reference: str = ""
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
    def in_short(self) -> str:
        """``"0.0948 / 7.43"``, or the state alone."""
        return self.headline if self.result else "OOM" if self.state == "oom" else self.state

    @property
    def steps(self) -> str:
        """``"10 steps, 0.0940–0.0961 s"``; empty for what is no result."""
        return self.result.range_in_words if self.result else ""

    @property
    def reserved(self) -> str:
        """``"9.20 reserved"``; empty where that is near to the peak, and for what is no result."""
        return self.result.reserved_in_words if self.result else ""

    @property
    def ratios(self) -> str:
        """``"1.30 × none · 0.99 × torch"``; empty where there is nothing to compare with."""
        both = ((self.x_none, "none"), (self.x_torch, "torch"))
        return " · ".join(f"{ratio:.2f} × {name}" for ratio, name in both if ratio is not None)

    @property
    def reference(self) -> str:
        """``"H100 0.721 / 7.67 (1.36 × none); L40S OOM"``, ``"no reference"``, or ``"no reference (truncated)"``."""
        none = f"{NO_REFERENCE} ({self.why_no_reference})" if self.why_no_reference else NO_REFERENCE
        return "; ".join(reference.in_words for reference in self.references) or none


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
    """Everything about one work, whole or truncated, real or tiny, on cards or on a CPU.

    name: for files and anchors, no other matrix's. common: what holds for all columns. warnings: what these figures
    are no measure of.
    """

    condition: Condition
    name: str
    title: str
    common: str
    on_cpu: bool
    modes: tuple[str, ...]
    columns: tuple[Column, ...]
    published: Published | None

    @property
    def rows(self) -> list[tuple[str, tuple[Cell, ...]]]:
        """Each mode with its cells, column by column."""
        return list(zip(self.modes, zip(*(column.cells for column in self.columns), strict=True), strict=True))

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*([ON_CPU] if self.on_cpu else []), *([TRUNCATED] if self.condition.depth else []))


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
        key = (condition.kind, condition.work, condition.size, outcome.on_cpu, tuple(sorted(condition.depth.items())))
        by_work.setdefault(key, []).append(outcome)
    works = sorted(by_work.values(), key=lambda found: (found[0].on_cpu, work_order(found[0].condition), _name(found)))
    matrices = tuple(map(_matrix, works, distinct_names(map(_name, works))))
    kinds = dict.fromkeys(matrix.condition.kind for matrix in matrices if matrix.published)
    return Report(matrices, machines(records), tuple(map(source, kinds)))


def _name(found: Sequence[Outcome]) -> str:
    condition = found[0].condition
    cut = [f"{stack}-{blocks}" for stack, blocks in condition.depth.items()]
    size = ["tiny"] * (condition.size == "tiny")
    return "-".join([condition.work, *size, *["cpu"] * found[0].on_cpu, *cut])


def _matrix(found: Sequence[Outcome], name: str) -> Matrix:
    by_column: dict[tuple[str, str], dict[str, Outcome]] = {}
    for outcome in found:
        key = (_in_mode("", outcome.condition).key, outcome.card)
        by_column.setdefault(key, {})[mode_title(outcome.condition)] = outcome
    condition, on_cpu = _in_mode("", found[0].condition), found[0].on_cpu
    groups = sorted(by_column.values(), key=_column_order)
    modes = ordered_modes(condition for group in groups for condition in _rows(group))
    titles, common = told_apart([facets(first.condition, first.card) for first in map(_first, groups)])
    columns = tuple(_column(group, title or "s/step / GiB", modes) for group, title in zip(groups, titles, strict=True))
    title = work_title(condition, on_cpu)
    return Matrix(condition, name, title, common, on_cpu, modes, columns, None if on_cpu else published(condition))


def _first(group: Mapping[str, Outcome]) -> Outcome:
    return next(iter(group.values()))


def _in_mode(mode: str, condition: Condition) -> Condition:
    return replace(condition, mode=mode, vram_budget=None)


def _rows(group: Mapping[str, Outcome]) -> Iterator[Condition]:
    """What was run of a column, and the modes of the bench that have a public figure under its condition."""
    yield from (outcome.condition for outcome in group.values())
    first = _first(group)
    published_here = (_in_mode(mode, first.condition) for mode in MODES if not first.on_cpu)
    yield from (condition for condition in published_here if references(condition))


def _column_order(group: Mapping[str, Outcome]) -> tuple[Any, ...]:
    outcome = _first(group)
    condition = outcome.condition
    place = _ADAPTERS.index(condition.adapter) if condition.adapter in _ADAPTERS else len(_ADAPTERS)
    what = (condition.precision, place, condition.rank or 0, condition.compile, condition.attention)
    return (outcome.card, *what, sorted(condition.sizes.items()))


def _column(group: Mapping[str, Outcome], title: str, modes: Sequence[str]) -> Column:
    first = _first(group)
    condition = _in_mode("", first.condition)
    cells = tuple(_cell(mode, group) for mode in modes)
    differs = differences(condition) if any(cell.references for cell in cells) else ()
    return Column(condition, first.card, title, tuple(differs), cells)


def _cell(mode: str, group: Mapping[str, Outcome]) -> Cell:
    first, outcome = _first(group), group.get(mode)
    why = incomparable(first.condition) or "CPU" * first.on_cpu
    cell = Cell(mode, outcome, () if why else references(_in_mode(mode, first.condition)), why)
    if outcome is None:
        return cell
    remarks = [f"runs disagree in {what}" for what in outcome.disagreements()]
    if cell.result is None:
        return replace(cell, remarks=tuple(remarks))
    none, torch = (_ratio(outcome, group.get(other)) for other in ("none", TORCH))
    remarks += () if outcome.on_cpu else _no_gain(mode, group)
    return replace(cell, x_none=none, x_torch=torch, remarks=tuple(remarks))


def _ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None or other is outcome or other.state != "ok":
        return None
    return outcome.step_s / other.step_s


def _no_gain(mode: str, group: Mapping[str, Outcome]) -> Iterator[str]:
    """Where a mode's peak is not below that of the mode it should improve on, something else makes the peak. ``auto``
    may take what its budget allows."""
    other = _WITHOUT_OFFLOAD.get(mode, "none")
    ours, theirs = group[mode], group.get(other)
    if mode == "none" or plans(mode) or theirs is None or theirs.state != "ok":
        return
    if ours.peak_bytes >= theirs.peak_bytes or not peaks_differ(ours.peak_bytes, theirs.peak_bytes):
        why = ": weights, gradients and optimizer states make it" if ours.condition.adapter == "full" else ""
        yield f"peak is not below {other}'s{why}"
