"""A receipt for people: what ran, by runs of like blocks, and what did not run as asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.cli.spans import Alike, add_stack, block_table
from lowtide.units import format_bytes

_MOST_NAMES, _MOST_REASONS = 3, 5


def receipt_table(receipt: Mapping[str, Any]) -> RenderableType:
    """What ``Receipt.as_dict()`` says, as a table, with the options and blocks that went another way below it.

    replays: how often blocks, or their feed-forward sides, ran again in backward. kept, on CPU, dropped: what they hold
    between forward and backward, what of it waits in CPU memory, and what was made again instead.
    """
    notes = [*_copies(receipt["totals"]), *_notes(receipt)]
    return Group("Receipt of the last step:\n", _table(receipt), *([Text(), *notes] if notes else []))


def _table(receipt: Mapping[str, Any]) -> Table:
    totals = receipt["totals"]
    sizes = {"kept": "kept_bytes", "on CPU": "cpu_bytes", "dropped": "recomputed_bytes"}
    if not _moved(totals):
        del sizes["on CPU"]
    table = block_table("replays", *sizes)
    for name, blocks in _by_stack(receipt["blocks"]).items():
        add_stack(table, name, blocks, _calls, *map(_bytes, sizes.values()))
    in_all = [format_bytes(totals[key]) for key in sizes.values()]
    table.add_row(
        Text("all", style="bold"), f"{len(receipt['blocks'])} blocks", str(totals["recompute_calls"]), *in_all
    )
    return table


def _calls(group: Alike) -> str:
    return str(group.total("recompute_calls"))


def _bytes(key: str) -> Callable[[Alike], str]:
    return lambda group: format_bytes(group.total(key))


def _moved(totals: Mapping[str, Any]) -> bool:
    return any(totals.get(key) for key in ("cpu_bytes", "d2h_bytes", "h2d_bytes"))


def _copies(totals: Mapping[str, Any]) -> Iterator[Text]:
    """What the copies to and from CPU memory took, where there were any."""
    if not _moved(totals):
        return
    yield Text(
        f"copies: {format_bytes(totals['d2h_bytes'])} out, {format_bytes(totals['h2d_bytes'])} back; "
        f"{totals['hidden_copy_ms']:.1f} ms hidden, {totals['exposed_copy_ms']:.1f} ms exposed"
    )
    yield Text(f"prefetch misses: {totals['prefetch_misses']}")
    pool = totals["pool"]
    fallbacks = f", fallbacks to ordinary memory {pool['fallbacks']}" if pool["fallbacks"] else ""
    yield Text(
        f"pool: {format_bytes(pool['pinned_bytes'])} pinned, {format_bytes(pool['pageable_bytes'])} not pinned; "
        f"buffers {pool['buffers']}, distinct sizes {pool['sizes']}{fallbacks}"
    )


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
