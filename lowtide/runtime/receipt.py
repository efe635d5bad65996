"""What really ran in the last step, as data."""

import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lowtide.units import counted, format_bytes

_SHOWN = 80
"""Characters of a warning in one line."""


@dataclass(frozen=True)
class BlockReceipt:
    """One block. Bytes are those of distinct storages, weights not counted.

    treatment: kept | whole | ffn | selective, with "+offload" where something of it waits in CPU memory. segment:
    blocks with one number were recomputed together. reason: why the block was not treated as planned.
    recompute_calls: how often its treated side ran again. kept_bytes: what it (or the checkpoint in its place) holds on
    the device between forward and backward. cpu_bytes: what waits in CPU memory. recomputed_bytes: dropped and made
    again.
    """

    name: str
    stack: str
    index: int
    treatment: str
    segment: int | None
    reason: str | None
    recompute_calls: int
    kept_bytes: int
    cpu_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True)
class Copies:
    """What the last step moved between the device and CPU memory.

    hidden_copy_ms: copying beside computation; exposed_copy_ms: computation that stood still for a copy. Both are of
    the last step that was timed: the first two with new input shapes are. prefetch_misses: reads whose copy had not
    even begun. pool: state of the CPU buffers, in bytes and counts; fallbacks: buffers that could not be pinned.
    """

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    hidden_copy_ms: float = 0.0
    exposed_copy_ms: float = 0.0
    prefetch_misses: int = 0
    pool: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Note:
    """An option or a block, and why."""

    subject: str
    reason: str


def _start_of(text: str) -> str:
    return textwrap.shorten(text, _SHOWN, placeholder=" …")


@dataclass(frozen=True, repr=False)
class Receipt:
    """What ran in the last step, block by block.

    inert: options that were honoured and changed nothing in this step. ignored: options that this model can never
    honour. fallbacks: blocks at which a segment ended early, or that were kept instead. warnings: whatever else a
    person should know.
    """

    blocks: tuple[BlockReceipt, ...]
    copies: Copies = field(default_factory=Copies)
    inert: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()
    fallbacks: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        """One line: treatments, recomputations, bytes, and how many notes of each kind there are."""
        totals = self.totals
        sizes = {"kept": "kept_bytes", "on CPU": "cpu_bytes", "recomputed": "recomputed_bytes"}
        treatments = Counter(block.treatment for block in self.blocks)
        parts = [
            f"{counted(len(self.blocks), 'block')}: "
            + ", ".join(f"{count} {name}" for name, count in treatments.items()),
            counted(totals["recompute_calls"], "recomputation"),
            ", ".join(f"{format_bytes(totals[key])} {name}" for name, key in sizes.items() if totals[key]),
            *(f"{name}: {', '.join(note.subject for note in notes)}" for name, notes in self._options() if notes),
            counted(len(self.fallbacks), "fallback") if self.fallbacks else "",
            f"{counted(len(self.warnings), 'warning')} ({_start_of(self.warnings[0])})" if self.warnings else "",
        ]
        return f"<Receipt: {'; '.join(part for part in parts if part)}>"

    def _options(self) -> tuple[tuple[str, tuple[Note, ...]], ...]:
        return ("inert", self.inert), ("ignored", self.ignored)

    @property
    def totals(self) -> dict[str, Any]:
        keys = ("recompute_calls", "kept_bytes", "cpu_bytes", "recomputed_bytes")
        return {key: sum(getattr(block, key) for block in self.blocks) for key in keys} | vars(self.copies)

    def as_dict(self) -> dict[str, Any]:
        return {
            "blocks": [dict(vars(block)) for block in self.blocks],
            "totals": self.totals,
            "inert": [{"option": note.subject, "reason": note.reason} for note in self.inert],
            "ignored": [{"option": note.subject, "reason": note.reason} for note in self.ignored],
            "fallbacks": [{"block": note.subject, "reason": note.reason} for note in self.fallbacks],
            "warnings": list(self.warnings),
        }
