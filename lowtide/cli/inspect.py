"""``lowtide inspect``: what a setting would do with every block of a model, without weights and without a GPU."""

import json as json_text
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lowtide.cli.options import (
    AsJson,
    Backend,
    Interval,
    OffloadAttention,
    OffloadMinBytes,
    SavedPlan,
    SegmentStride,
    Target,
    controls_from,
    schedule_from,
)
from lowtide.cli.output import count_in_words, show, show_json, working
from lowtide.cli.spans import add_stack, block_table
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError


class Size(StrEnum):
    """The configurations that every family has."""

    tiny = "tiny"
    real = "real"


class Device(StrEnum):
    """Where a model is built."""

    meta = "meta"
    cpu = "cpu"


_Inputs = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|JSON",
        help="For a model of no known family: the arguments of its forward, as a JSON object of names and shapes. One "
        "forward is run, and compared with what structure shows.",
    ),
]
_Device = Annotated[
    Device, typer.Option(help="meta needs no weights; cpu reads them, for a forward that depends on values.")
]
_SizeOption = Annotated[
    Size | None, typer.Option(help="Which configuration of a family to build (real). A folder has its own.")
]


def inspect(
    target: Target,
    backend: Backend = "torch",
    interval: Interval = None,
    segment_stride: SegmentStride = None,
    offload_attention: OffloadAttention = False,
    offload_min_bytes: OffloadMinBytes = None,
    plan: SavedPlan = None,
    size: _SizeOption = None,
    inputs: _Inputs = None,
    device: _Device = Device.meta,
    json: AsJson = False,
) -> None:
    """Show which blocks of a model a setting keeps, recomputes, recomputes as one segment, and offloads."""
    config = controls_from(backend, interval, segment_stride, offload_attention, offload_min_bytes)
    schedule = schedule_from(plan, config)
    shapes = None if inputs is None else _shapes(inputs)
    with working():
        from lowtide.measure.build import is_folder, open_target
        from lowtide.measure.inspection import inspect_target
        from lowtide.measure.watch import inputs_of

        if size is not None and is_folder(target):
            raise ConfigError(f"--size chooses a configuration of a family, and {target} has its own: leave it out")
        opened = open_target(target, (size or Size.real).value, device=device.value)
        given = None if shapes is None else inputs_of(shapes, opened.model)
        result = inspect_target(opened, config, given, schedule).as_dict()
    if json:
        show_json(result)
    else:
        show(_heading(result, plan), _table(result), *_remarks(result))


def _shapes(inputs: str) -> dict[str, Any]:
    """The JSON object that ``--inputs`` gives, itself or in a file. Raises ConfigError where it is none."""
    try:
        text = inputs if inputs.lstrip().startswith("{") else Path(inputs).read_text(encoding="utf-8")
        shapes = json_text.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the inputs {inputs!r}: {error}") from error
    if not isinstance(shapes, dict):
        raise ConfigError('inputs must be a JSON object of names and shapes, as in {"hidden_states": [1, 4, 32, 32]}')
    return shapes


def _heading(result: Mapping[str, Any], plan: str | None) -> str:
    model = f"{result['model']}: {result['class']}, {count_in_words(result['parameters'])} parameters"
    return f"{model}\nWith {setting_in_words(result['settings'], plan)}:\n"


def setting_in_words(settings: Mapping[str, Any] | None, plan: str | None = None) -> str:
    """``backend torch, interval 2, offload attention``: the backend, and what is not as it is by default.

    plan: the file of the plan that was taken instead of settings.
    """
    if settings is None:
        return f"the plan in {plan}"
    config, usual = CheckpointConfig.for_attach(**settings), CheckpointConfig().attach_arguments()
    words = ["no backend (nothing is recomputed)" if settings["backend"] is None else f"backend {settings['backend']}"]
    for name, value in settings.items():
        if name != "backend" and value != usual[name] and (config.moves or not name.startswith("offload")):
            words.append(name.replace("_", " ") + ("" if value is True else f" {value}"))
    return ", ".join(words)


def _table(result: Mapping[str, Any]) -> Table:
    table = block_table()
    for stack in result["stacks"]:
        add_stack(table, stack["name"], stack["blocks"])
    return table


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("inert", "ignored"):
        for note in result[kind]:
            yield f"\n{kind}: {note['option']}: {note['reason']}"
    yield f"\nBackends that this model can run: {', '.join(result['scopes'])}."
    found = [stack for stack in result["stacks"] if stack["found"]]
    if found:
        yield "\nNo family describes this class: its block stacks were found by structure."
    for stack in found:
        yield f"  {stack['name']}: {', '.join(stack['block_classes'])}"
        yield f"    {stack['certainty']}: {'; '.join(stack['why'])}"
        yield f"    feed-forward: {_sides(stack, 'feed_forward')}"
        yield f"    attention: {_sides(stack, 'attention')}"
    for missed in result["missed"]:
        yield f"  in no stack, though called one after another: {', '.join(missed['names'])} ({missed['class']})"
    if any(stack["certainty"] == "structure" for stack in found):
        yield "With --inputs a forward is run that confirms this, or says what is doubtful."


def _sides(stack: Mapping[str, Any], key: str) -> str:
    """Paths of submodules; behind a doubtful one, why."""
    doubts = {path: side["why"] for path, side in stack["sides"].items() if side["certainty"] == "doubtful"}
    names = [f"{path} (doubtful: {'; '.join(doubts[path])})" if path in doubts else path for path in stack[key]]
    return ", ".join(names) or "none found"
