"""``lowtide verify``: one plain training step beside one with checkpointing, compared bit by bit."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.cli.inspect import setting_in_words
from lowtide.cli.options import (
    AsJson,
    Backend,
    Interval,
    OffloadAttention,
    SavedPlan,
    SegmentStride,
    Target,
    controls_from,
    schedule_from,
)
from lowtide.cli.output import show, show_json, working
from lowtide.cli.receipt_table import receipt_table
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.plan.schedule import Schedule
from lowtide.units import counted

if TYPE_CHECKING:
    from lowtide.runtime.resolve import ResolvedStack

_MOST_SHOWN = 10
_SIMULATED = "simulated on the CPU"
_OffloadMinBytes = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Tensors whose storage is smaller are not moved. 0 here, because models and inputs are small.",
    ),
]


def verify(
    target: Target,
    backend: Backend = "torch",
    interval: Interval = None,
    segment_stride: SegmentStride = None,
    offload_attention: OffloadAttention = False,
    offload_min_bytes: _OffloadMinBytes = "0",
    plan: SavedPlan = None,
    json: AsJson = False,
) -> None:
    """Prove that a setting changes no number: outputs, loss and every gradient against a plain step, on the CPU.

    A family runs in its tiny configuration; the model of a folder runs as it is, on small inputs. What would wait in
    CPU memory beside an accelerator is copied within CPU memory here.
    """
    config = controls_from(backend, interval, segment_stride, offload_attention, offload_min_bytes)
    with working():
        result = _verified(target, config, schedule_from(plan, config))
    if json:
        show_json(result)
    else:
        show(*_report(result, plan))
    if not result["same"]:
        raise typer.Exit(1)


def _verified(target: str, config: CheckpointConfig, schedule: Schedule | None) -> dict[str, Any]:
    from lowtide.measure.build import open_target
    from lowtide.measure.inspection import class_of
    from lowtide.measure.parity import verify as run_both
    from lowtide.runtime.resolve import resolve
    from lowtide.testing import cpu_offload

    opened = open_target(target, "tiny")
    moves = config.moves if schedule is None else schedule.moves_anything
    if schedule is not None and opened.family is not None and not Path(target).is_dir():
        _check_size(target, schedule, resolve(opened.model, opened.family.stacks))
    with cpu_offload() if moves else nullcontext():
        report = run_both(opened, **{**config.attach_arguments(), "schedule": schedule})
    return {
        "model": report.label,
        "class": class_of(opened.model),
        "family": opened.family.key if opened.family else None,
        "settings": config.attach_arguments() if schedule is None else None,
        "offload": _SIMULATED if report.receipt["totals"]["d2h_bytes"] else None,
        "same": report.same,
        "loss": report.loss,
        "gradients": report.gradients,
        "differences": [dict(vars(difference)) for difference in report.differences],
        "receipt": report.receipt,
    }


def _check_size(target: str, schedule: Schedule, stacks: "list[ResolvedStack]") -> None:
    """A plan for a real model is none for the tiny one that a family's name stands for here."""
    from lowtide.handle import check_schedule

    try:
        check_schedule(schedule, stacks)
    except ConfigError as error:
        raise ConfigError(
            f"{error}: {target} is verified in its tiny configuration. Give the folder of the model that the plan is "
            f"for; `lowtide inspect {target} --plan` shows what the plan does with the real configuration"
        ) from error


def _report(result: Mapping[str, Any], plan: str | None) -> Iterator[RenderableType]:
    yield f"{result['model']}: {result['class']}"
    yield f"A plain step beside one with {setting_in_words(result['settings'], plan)}:"
    if result["offload"] is not None:
        yield f"Offload {result['offload']}: copies were made synchronously, within CPU memory."
    yield ""
    yield _comparison(result)
    yield ""
    yield receipt_table(result["receipt"])
    if result["same"]:
        yield Text("\nSame: loss, outputs and every gradient are bit-identical to a plain step.", style="green")
    else:
        differ = counted(len(result["differences"]), "tensor")
        yield Text(f"\nDifferent: {differ} that a plain step gives otherwise.", style="red")


def _comparison(result: Mapping[str, Any]) -> Table:
    table = Table("compared", "result", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    differences = {item["tensor"]: item for item in result["differences"]}
    outputs = sum(name.startswith("output ") for name in differences)
    gradients = sum(name.startswith("gradient of ") for name in differences)
    table.add_row("outputs", f"{outputs} differ" if outputs else "bit-identical")
    table.add_row("loss", f"{result['loss']:.6g}, {'differs' if 'loss' in differences else 'bit-identical'}")
    table.add_row("gradients", f"{result['gradients'] - gradients} of {result['gradients']} bit-identical")
    for name, item in list(differences.items())[:_MOST_SHOWN]:
        size = "" if item["max_abs"] is None else f" by up to {item['max_abs']:.3g}"
        table.add_row(name, Text(f"{item['what']}{size}", style="red"))
    return table
