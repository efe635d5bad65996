"""``lowtide inspect``: what a setting would do with every block of a model, without weights and without a GPU."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from lowtide.cli.options import AsJson, Backend, Interval, OffloadAttention, OffloadMinBytes, SegmentStride, Target
from lowtide.cli.output import count_in_words, show, show_json, working
from lowtide.cli.spans import add_stack, block_table
from lowtide.controls import CheckpointConfig


class Size(StrEnum):
    """The configurations that every family has."""

    tiny = "tiny"
    real = "real"


_SizeOption = Annotated[Size, typer.Option(help="Which configuration of a family to build. A folder has its own.")]


def inspect(
    target: Target,
    backend: Backend = "torch",
    interval: Interval = None,
    segment_stride: SegmentStride = None,
    offload_attention: OffloadAttention = False,
    offload_min_bytes: OffloadMinBytes = None,
    size: _SizeOption = Size.real,
    json: AsJson = False,
) -> None:
    """Show which blocks of a model a setting keeps, recomputes, recomputes as one segment, and offloads."""
    config = CheckpointConfig.for_attach(
        backend, interval, segment_stride, offload_attention, offload_min_bytes=offload_min_bytes
    )
    with working():
        from lowtide.measure.build import open_target
        from lowtide.measure.inspection import inspect_target

        result = inspect_target(open_target(target, size.value, device="meta"), config).as_dict()
    if json:
        show_json(result)
    else:
        show(_heading(result), _table(result), *_remarks(result))


def _heading(result: Mapping[str, Any]) -> str:
    model = f"{result['model']}: {result['class']}, {count_in_words(result['parameters'])} parameters"
    return f"{model}\nWith {setting_in_words(result['settings'])}:\n"


def setting_in_words(settings: Mapping[str, Any]) -> str:
    """``backend torch, interval 2, offload attention``: the backend, and what is not as it is by default."""
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
    yield f"\nBackends that this model can run: {', '.join(result['scopes'])}."
    found = [stack for stack in result["stacks"] if stack["found"]]
    if found:
        yield "\nNo family describes this class: its block stacks were found by structure."
    for stack in found:
        yield f"  {stack['name']}: {', '.join(stack['block_classes'])}"
        yield f"    feed-forward: {', '.join(stack['feed_forward']) or 'none found'}"
        yield f"    attention: {', '.join(stack['attention']) or 'none found'}"
