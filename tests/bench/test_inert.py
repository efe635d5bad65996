"""Options that were made inert on purpose, measured here in tiny sizes: the report takes none of them for a result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lowtide import families
from lowtide.bench.cell import Effort, receipt_of, run_cell
from lowtide.bench.markdown import markdown
from lowtide.bench.plot import sheets
from lowtide.bench.record import Condition, Record
from lowtide.bench.report import Cell, build_report
from lowtide.bench.sweep import family_conditions
from lowtide.bench.works import Task, build
from lowtide.controls import CheckpointConfig
from lowtide.handle import Handle, schedule_for
from lowtide.runtime.resolve import ResolvedStack, resolve
from tests.bench.records import MACHINE, figures


def tiny(mode: str) -> Condition:
    return next(family_conditions(["flux1"], [mode], {}, size="tiny"))


def shown(record: Record) -> Cell:
    """The cell of a record, with the figures of a card; where it is inert, these stand nowhere."""
    none = replace(record.condition, mode="none")
    base = Record(none, "ok", MACHINE, figures=figures(0.5, 20.0))  # a frontier has two points
    report = build_report([base, replace(record, machine=MACHINE, figures=figures(1.0, 8.0))])
    (matrix,) = report.matrices
    _, cell = matrix.columns[0].cells
    assert ("1.000 / 8.00" in markdown(report)) == (cell.state != "inert")
    assert len(list(sheets(report))) == (cell.state != "inert")
    return cell


def stepped(task: Task, stacks: Sequence[ResolvedStack], **controls: Any) -> Record:
    """A record of one step with these stacks and controls."""
    config = CheckpointConfig(**{f"gradient_checkpointing_{name}": value for name, value in controls.items()})
    with Handle(task.model, list(stacks), schedule_for(list(stacks), config), config) as handle:
        task.step()
        receipt = receipt_of(replace(task, stacks=list(stacks)), handle)
    return Record(tiny("layer"), "ok", MACHINE, receipt=receipt)


def ran(mode: str) -> Record:
    return run_cell(tiny(mode), Effort(warm_up=1, steps=2), "cpu", MACHINE)


def test_a_stack_that_is_missing_from_the_row() -> None:
    task = build(tiny("layer"), "cpu")
    stacks = resolve(task.model, families.find("flux1").stacks[:1])
    missing = len(task.blocks) - len(stacks[0].blocks)
    cell = shown(stepped(task, stacks))
    assert cell.state == "inert"
    assert cell.headline.startswith(f"inert (backend: {missing} blocks of FluxSingleTransformerBlock (")
    assert cell.headline.endswith("the first) are in no treated stack)")
    assert shown(stepped(task, task.stacks)).state == "ok"


def test_a_stride_that_is_the_interval() -> None:
    task = build(tiny("layer"), "cpu")
    cell = shown(stepped(task, task.stacks, interval=1, segment_stride=1))
    assert cell.state == "inert"
    assert cell.headline.startswith("inert (segment_stride: ")
    assert shown(stepped(task, task.stacks, interval=1, segment_stride=2)).state == "ok"


def test_attention_offload_where_every_block_is_recomputed() -> None:
    assert shown(ran("layer-offload")).headline == "inert (offload_attention: attention is recomputed)"
    assert shown(ran("activation-offload")).state == "ok"
