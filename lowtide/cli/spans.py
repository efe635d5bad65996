"""Many blocks in few words: blocks of one stack that are treated alike, and their indices as ranges."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from lowtide.plan.schedule import FFN, KEPT, SELECTIVE, WHOLE

_MOST_SPANS = 3
_WORDS = {KEPT: "kept", WHOLE: "recomputed", FFN: "ffn recomputed", SELECTIVE: "selective"}


@dataclass
class Alike:
    """Blocks of one stack with one treatment, one segment width and one reason.

    treatment: with ``+offload`` where something of the blocks waits in CPU memory.
    width: blocks that are recomputed as one; 0 where there is no segment.
    moves: what of the blocks is to wait in CPU memory, where that is known: inspections know it, receipts the bytes.
    blocks: as inspections and receipts have them.
    """

    treatment: str
    width: int
    reason: str | None
    moves: tuple[str, ...] = ()
    blocks: list[Mapping[str, Any]] = field(default_factory=list)

    def total(self, key: str) -> int:
        return sum(block[key] for block in self.blocks)

    @property
    def words(self) -> str:
        """What is done with these blocks, in words."""
        together = f", {self.width} as one" if self.width > 1 else ""
        moved = f" + offload ({', '.join(self.moves)})" if self.moves else ""
        return _WORDS[self.treatment.partition("+")[0]] + together + moved + (f": {self.reason}" if self.reason else "")

    @property
    def spans(self) -> str:
        """Their indices, and how many: ``0-1, 4-5 … 16-17 (10)``. A segment of several blocks is its own span."""
        if self.width > 1:
            segments = {block["segment"]: 0 for block in self.blocks}
            runs = [[b["index"] for b in self.blocks if b["segment"] == segment] for segment in segments]
        else:
            runs = _runs(block["index"] for block in self.blocks)
        return f"{_shortened([_span(run) for run in runs])} ({len(self.blocks)})"


def alike(blocks: Iterable[Mapping[str, Any]]) -> list[Alike]:
    """Blocks of one stack, put together with those like them; in order of the first of each."""
    items = list(blocks)
    widths: dict[int, int] = {}
    for block in items:
        if block["segment"] is not None:
            widths[block["segment"]] = widths.get(block["segment"], 0) + 1
    groups: dict[tuple[Any, ...], Alike] = {}
    for block in items:
        width = widths.get(block["segment"], 0)
        key = (block["treatment"], width, block["reason"], tuple(block.get("moves", ())))
        groups.setdefault(key, Alike(*key))
        groups[key].blocks.append(block)
    return list(groups.values())


def block_table(*headings: str) -> Table:
    """An empty table of blocks and their treatments, with these further columns of numbers."""
    table = Table("blocks", "treatment", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def add_stack(table: Table, name: str, blocks: Iterable[Mapping[str, Any]], *keys: Callable[[Alike], str]) -> None:
    """Add to a table a row with a stack's name, and one for each kind of block in it. keys: the further columns."""
    groups = alike(blocks)
    table.add_row(Text(name, style="bold"), f"{sum(len(group.blocks) for group in groups)} blocks")
    for group in groups:
        table.add_row(f"  {group.spans}", Text(group.words), *(key(group) for key in keys))
    table.add_section()


def _runs(indices: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _span(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _shortened(spans: Sequence[str]) -> str:
    if len(spans) <= _MOST_SPANS:
        return ", ".join(spans)
    return f"{', '.join(spans[: _MOST_SPANS - 1])} … {spans[-1]}"
