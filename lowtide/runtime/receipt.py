"""What really ran in the last step, as data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockReceipt:
    """One block. Bytes are those of distinct storages, weights not counted.

    treatment: kept | whole | ffn. segment: blocks with one number were recomputed together. reason: why the block was
    not treated as planned. recompute_calls: how often its treated side ran again. kept_bytes: what it (or the
    checkpoint in its place) holds on the device between forward and backward. recomputed_bytes: dropped and made again.
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
class Note:
    """An option or a block, and why."""

    subject: str
    reason: str


@dataclass(frozen=True)
class Receipt:
    """What ran in the last step, block by block.

    inert: options that were honoured and changed nothing in this step. ignored: options that this model can never
    honour. fallbacks: blocks at which a segment ended early, or that were kept instead. warnings: whatever else a
    person should know.
    """

    blocks: tuple[BlockReceipt, ...]
    inert: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()
    fallbacks: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def totals(self) -> dict[str, int]:
        keys = ("recompute_calls", "kept_bytes", "cpu_bytes", "recomputed_bytes")
        return {key: sum(getattr(block, key) for block in self.blocks) for key in keys}

    def as_dict(self) -> dict[str, Any]:
        return {
            "blocks": [dict(vars(block)) for block in self.blocks],
            "totals": self.totals,
            "inert": [{"option": note.subject, "reason": note.reason} for note in self.inert],
            "ignored": [{"option": note.subject, "reason": note.reason} for note in self.ignored],
            "fallbacks": [{"block": note.subject, "reason": note.reason} for note in self.fallbacks],
            "warnings": list(self.warnings),
        }
