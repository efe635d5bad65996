"""What stands behind each cell of a matrix: runs, spread, reserved and host memory, and what the receipt counted."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lowtide.bench.outcome import GIB, Outcome, first_line
from lowtide.bench.planned import in_words
from lowtide.bench.report import Cell, Matrix


@dataclass(frozen=True)
class Detail:
    """What stands behind a cell, for a table below the matrix. Times in seconds, memory in GiB, of all runs."""

    mode: str
    column: str
    runs: str
    spread: str
    reserved: str
    host: str
    first_step: str
    blocks: str
    notes: tuple[str, ...]


def details(matrix: Matrix) -> Iterator[Detail]:
    """One entry for each cell that was run, column by column. Inert cells have no figures here either."""
    for column in matrix.columns:
        for cell in column.cells:
            if cell.outcome is not None:
                yield _detail(cell, cell.outcome, column.title)


def _detail(cell: Cell, outcome: Outcome, column: str) -> Detail:
    figures = outcome.figures if cell.result else ()
    last = outcome.records[-1].receipt or {}
    spread = outcome.spread_s if figures else None
    notes = [*outcome.inert, *map(first_line, outcome.reasons), *cell.remarks, *_receipt_notes(last)]
    notes += in_words(last["plan"], figures[-1]) if figures and "plan" in last else []
    notes += list(_left_out(outcome))
    return Detail(
        mode=cell.mode,
        column=column,
        runs=_runs(outcome) if figures else str(len(outcome.records)),
        spread=f"{spread:.4f}" if spread is not None else "",
        reserved=f"{max(run.peak_reserved_bytes for run in figures) / GIB:.2f}" if figures else "",
        host=f"{max(run.host_peak_bytes for run in figures) / GIB:.2f}" if figures else "",
        first_step=f"{median(run.first_step_s for run in figures):.2f}" if figures else "",
        blocks=", ".join(f"{count} {treatment}" for treatment, count in last.get("blocks", {}).items()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _runs(outcome: Outcome) -> str:
    """``"2 (10 + 10 steps after 5 + 5)"``."""
    before = " + ".join(str(run.warm_up_steps) for run in outcome.figures)
    return f"{len(outcome.records)} ({outcome.steps_in_words} after {before})"


def _left_out(outcome: Outcome) -> Iterator[str]:
    """``"3 earlier records of other commits are left out (2 failed, 1 ok)"``."""
    if outcome.superseded:
        states = Counter(record.state for record in outcome.superseded).most_common()
        told = ", ".join(f"{count} {state}" for state, count in states)
        count = len(outcome.superseded)
        which = (
            "1 earlier record of another commit is" if count == 1 else f"{count} earlier records of other commits are"
        )
        yield f"{which} left out ({told})"


def _receipt_notes(receipt: Mapping[str, Any]) -> Iterator[str]:
    fallbacks = receipt.get("fallbacks", ())
    if fallbacks:
        yield f"{len(fallbacks)} fallbacks, the first at {fallbacks[0]['block']}: {first_line(fallbacks[0]['reason'])}"
    yield from map(first_line, receipt.get("warnings", ()))
