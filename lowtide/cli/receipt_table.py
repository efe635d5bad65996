"""A receipt for people: what ran, by runs of like blocks, and what did not run as asked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.cli.spans import Alike, add_stack, block_table
from lowtide.units import format_bytes

_MOST_NAMES, _MOST_REASONS = 3, 5


def receipt_table(receipt: Mapping[str, Any]) -> RenderableType:
    """What ``Receipt.as_dict()`` says, as a table, with the options and blocks that went another way below it.

    replays: how often blocks, or their feed-forward sides, ran again in backward. kept, dropped: what they hold between
    forward and backward, and what was made again instead.
    """
    notes = list(_notes(receipt))
    return Group("Receipt of the last step:\n", _table(receipt), *([Text(), *notes] if notes else []))


def _table(receipt: Mapping[str, Any]) -> Table:
    table = block_table("replays", "kept", "dropped")
    for name, blocks in _by_stack(receipt["blocks"]).items():
        add_stack(table, name, blocks, _calls, _kept, _recomputed)
    totals = receipt["totals"]
    sizes = [format_bytes(totals[key]) for key in ("kept_bytes", "recomputed_bytes")]
    table.add_row(Text("all", style="bold"), f"{len(receipt['blocks'])} blocks", str(totals["recompute_calls"]), *sizes)
    return table


def _calls(group: Alike) -> str:
    return str(group.total("recompute_calls"))


def _kept(group: Alike) -> str:
    return format_bytes(group.total("kept_bytes"))


def _recomputed(group: Alike) -> str:
    return format_bytes(group.total("recomputed_bytes"))


def _by_stack(blocks: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    stacks: dict[str, list[Mapping[str, Any]]] = {}
    for block in blocks:
        stacks.setdefault(block["stack"], []).append(block)
    return stacks


def _notes(receipt: Mapping[str, Any]) -> Iterator[Text]:
    for kind in ("inert", "ignored"):
        for note in receipt[kind]:
            yield Text(f"{kind}: {note['option']}: {note['reason']}", style="yellow")
    by_reason = _blocks_by_reason(receipt["fallbacks"])
    for reason, names in list(by_reason.items())[:_MOST_REASONS]:
        yield Text(f"fallback at {_few(names)}: {reason}", style="yellow")
    if len(by_reason) > _MOST_REASONS:
        yield Text(f"fallback: {len(by_reason) - _MOST_REASONS} more reasons are in the receipt", style="yellow")
    for warning in receipt.get("warnings", ()):
        yield Text(f"warning: {warning}", style="yellow")


def _blocks_by_reason(fallbacks: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    by_reason: dict[str, list[str]] = {}
    for fallback in fallbacks:
        by_reason.setdefault(fallback["reason"], []).append(fallback["block"])
    return by_reason


def _few(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} … {names[-1]} ({len(names)} blocks)"
