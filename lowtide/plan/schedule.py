"""From (depth, scope, interval, stride) to a treatment for every block. Pure functions."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import ConfigError

KEPT, WHOLE, FFN, SELECTIVE = "kept", "whole", "ffn", "selective"
TREATMENTS = (KEPT, WHOLE, FFN, SELECTIVE)
IN_SEGMENTS = (WHOLE, SELECTIVE)
"""Treatments that recompute blocks whole, alone or a few together."""

MIN_BYTES = 2**20
"""A smaller storage never moves to CPU memory, unless told otherwise."""
MAX_SIZES = 12
"""Distinct sizes of pinned buffers, unless told otherwise."""

BOUNDARY, ATTENTION, SAVED = "boundary", "attention", "saved"
MOVES: Mapping[str, frozenset[str]] = {
    KEPT: frozenset({ATTENTION, SAVED}),
    FFN: frozenset({BOUNDARY, ATTENTION, SAVED}),
    WHOLE: frozenset({BOUNDARY}),
    SELECTIVE: frozenset({BOUNDARY, ATTENTION}),
}
"""What of a block can wait in CPU memory, by treatment.

boundary: the arguments that its checkpoint holds. attention: what its attention side saves; of a selective block, the
outputs of its attention kernel. saved: whatever it saves and does not recompute, the attention side included.
"""


@dataclass(frozen=True)
class StackSchedule:
    """Treatment of every block of one stack.

    treatments: one of TREATMENTS a block, in call order.
    segments: number of the planned segment that a block recomputed whole shares with its neighbours, else None.
    moves: what of each block waits in CPU memory, see MOVES; empty: nothing of any block.
    """

    treatments: tuple[str, ...]
    segments: tuple[int | None, ...]
    moves: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        if not self.moves:
            object.__setattr__(self, "moves", (frozenset(),) * len(self.treatments))
        if not len(self.treatments) == len(self.segments) == len(self.moves):
            raise ValueError("treatments, segments and moves must have one entry a block")
        for treatment, segment, moves in zip(self.treatments, self.segments, self.moves, strict=True):
            if treatment not in TREATMENTS:
                raise ValueError(f"unknown treatment {treatment!r}; allowed: {', '.join(TREATMENTS)}")
            if (segment is not None) != (treatment in IN_SEGMENTS):
                raise ValueError("a block has a segment number exactly when it is recomputed whole or selectively")
            if not moves <= MOVES[treatment]:
                allowed = ", ".join(sorted(MOVES[treatment]))
                raise ValueError(
                    f"of a {treatment} block can wait in CPU memory: {allowed}; not {', '.join(sorted(moves))}"
                )

    @property
    def depth(self) -> int:
        return len(self.treatments)

    @property
    def words(self) -> tuple[str, ...]:
        """Of each block, as ``mixed`` takes them."""
        return tuple(map(word_of, self.treatments, self.moves))

    def blocks_of(self, segment: int) -> tuple[int, ...]:
        return tuple(index for index, number in enumerate(self.segments) if number == segment)

    @property
    def last_together(self) -> tuple[int, ...]:
        """The blocks that backward comes to first, as one."""
        segment = self.segments[-1]
        return (self.depth - 1,) if segment is None else self.blocks_of(segment)

    def count(self, treatment: str) -> int:
        return self.treatments.count(treatment)

    def moving(self, what: str | Iterable[str], blocks: Iterable[int] | None = None) -> "StackSchedule":
        """The same, with ``what`` waiting in CPU memory as far as each block's treatment allows. blocks: None: all."""
        chosen = set(range(self.depth) if blocks is None else blocks)
        if strange := sorted(chosen - set(range(self.depth))):
            raise ConfigError(
                f"block {strange[0]} is not one of the {self.depth} blocks of this stack (0 is the first)"
            )
        wanted = frozenset((what,) if isinstance(what, str) else what)
        for word in wanted - {BOUNDARY, ATTENTION, SAVED}:
            raise ConfigError(
                f"{word!r} is nothing that can wait in CPU memory; {_near(word, (BOUNDARY, ATTENTION, SAVED))}"
            )
        moves = tuple(
            moves | (wanted & MOVES[treatment]) if index in chosen else moves
            for index, (treatment, moves) in enumerate(zip(self.treatments, self.moves, strict=True))
        )
        return replace(self, moves=moves)


@dataclass(frozen=True)
class Schedule:
    """Treatment of every block of a model: one StackSchedule a stack name.

    in_flight_bytes: how much may wait on the accelerator for its copy to CPU memory; prefetch_bytes: how much may be
    brought back before it is needed. None: what the block that moves most moves.
    """

    stacks: Mapping[str, StackSchedule]
    in_flight_bytes: int | None = None
    prefetch_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, stack in self.stacks.items():
            if not isinstance(stack, StackSchedule):
                raise ConfigError(
                    f"the schedule of stack {name!r} must be a StackSchedule (see `mixed`), not {stack!r}"
                )
        for name in ("in_flight_bytes", "prefetch_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ConfigError(f"{name}: {value!r} is not allowed; allowed: a number of bytes, 0 or more, or None")

    @property
    def moves_anything(self) -> bool:
        return any(moves for stack in self.stacks.values() for moves in stack.moves)

    @property
    def in_short(self) -> str:
        """How many blocks have which treatment: ``15 ffn+attention, 1 kept``."""
        words = Counter(word for stack in self.stacks.values() for word in stack.words)
        return ", ".join(f"{count} {word}" for word, count in words.most_common())

    @property
    def reaches_in(self) -> bool:
        """Whether blocks are treated side by side: then they are not compiled as they are."""
        ways = (way for stack in self.stacks.values() for way in zip(stack.treatments, stack.moves, strict=True))
        return any(reaches_in(*way) for way in ways)


def reaches_in(treatment: str, moves: frozenset[str]) -> bool:
    """Whether a block that is treated so is intercepted at its sides, and not only as a whole."""
    return treatment == FFN or (treatment == KEPT and ATTENTION in moves)


def word_of(treatment: str, moves: Iterable[str]) -> str:
    """A treatment, and what of the block waits in CPU memory, as ``mixed`` takes it."""
    return "+".join((treatment, *sorted(moves)))


def mixed(blocks: Sequence[str]) -> StackSchedule:
    """A stack from one word a block: a treatment, and what of the block waits in CPU memory, joined by ``+``.

    ``["ffn+boundary+attention", "selective+boundary", "kept"]``. Every block is a segment of its own.
    """
    parts = [_parts(block) for block in blocks]
    segments = tuple(index if part[0] in IN_SEGMENTS else None for index, part in enumerate(parts))
    return StackSchedule(tuple(part[0] for part in parts), segments, tuple(frozenset(part[1:]) for part in parts))


def _parts(block: str) -> list[str]:
    parts = [part.strip() for part in block.split("+")] if isinstance(block, str) else []
    if not parts or parts[0] not in TREATMENTS:
        raise ConfigError(f"{block!r} does not begin with a treatment; {_near(block, TREATMENTS)}")
    for part in parts[1:]:
        if part not in MOVES[parts[0]]:
            allowed = tuple(sorted(MOVES[parts[0]]))
            raise ConfigError(f"{part!r} in {block!r} cannot wait in CPU memory; {_near(part, allowed)}")
    return parts


def _near(word: object, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(word), allowed, n=1)
    return f"allowed: {', '.join(allowed)}" + (f"; did you mean {near[0]!r}?" if near else "")


def keep_all(depth: int) -> StackSchedule:
    """Nothing is recomputed."""
    return StackSchedule((KEPT,) * depth, (None,) * depth)


def whole_blocks(depth: int, interval: int = 1, stride: int | None = None, treatment: str = WHOLE) -> StackSchedule:
    """Segments of ``interval`` blocks start every ``stride`` blocks (default: ``interval``); the rest is kept.

    treatment: WHOLE or SELECTIVE. The last segment may be shorter. interval 2, stride 4 over 7 blocks: 0–1, 4–5
    recomputed; 2, 3, 6 kept.
    """
    stride = interval if stride is None else stride
    _check(depth, interval, stride)
    segments = tuple(i // stride if i % stride < interval else None for i in range(depth))
    return StackSchedule(tuple(KEPT if s is None else treatment for s in segments), segments)


def feed_forwards(depth: int, interval: int = 1, stride: int | None = None) -> StackSchedule:
    """Block i's feed-forward is recomputed iff i mod interval = 0; with a stride iff i mod stride < interval."""
    _check(depth, interval, interval if stride is None else stride)
    treated = [i % interval == 0 if stride is None else i % stride < interval for i in range(depth)]
    return StackSchedule(tuple(FFN if t else KEPT for t in treated), (None,) * depth)


def _check(depth: int, interval: int, stride: int) -> None:
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}")
    if interval < 1:
        raise ValueError(f"interval must be at least 1, got {interval}")
    if stride < interval:
        raise ValueError(f"segment stride {stride} is smaller than interval {interval}")
