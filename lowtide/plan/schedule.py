"""From (depth, scope, interval, stride) to a treatment for every block. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass

KEPT, WHOLE, FFN = "kept", "whole", "ffn"
TREATMENTS = (KEPT, WHOLE, FFN)


@dataclass(frozen=True)
class StackSchedule:
    """Treatment of every block of one stack; for whole blocks, the segment that each belongs to.

    treatments: one of TREATMENTS a block, in call order.
    segments: number of the planned segment that a ``whole`` block shares with its neighbours, else None.
    """

    treatments: tuple[str, ...]
    segments: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.treatments) != len(self.segments):
            raise ValueError("treatments and segments must have one entry a block")
        for treatment, segment in zip(self.treatments, self.segments, strict=True):
            if treatment not in TREATMENTS:
                raise ValueError(f"unknown treatment {treatment!r}; allowed: {', '.join(TREATMENTS)}")
            if (segment is not None) != (treatment == WHOLE):
                raise ValueError("a block has a segment number exactly when its treatment is 'whole'")

    @property
    def depth(self) -> int:
        return len(self.treatments)

    def blocks_of(self, segment: int) -> tuple[int, ...]:
        return tuple(index for index, number in enumerate(self.segments) if number == segment)

    def count(self, treatment: str) -> int:
        return self.treatments.count(treatment)


@dataclass(frozen=True)
class Schedule:
    """Treatment of every block of a model: one StackSchedule a stack name."""

    stacks: Mapping[str, StackSchedule]


def keep_all(depth: int) -> StackSchedule:
    """Nothing is recomputed."""
    return StackSchedule((KEPT,) * depth, (None,) * depth)


def whole_blocks(depth: int, interval: int = 1, stride: int | None = None) -> StackSchedule:
    """Segments of ``interval`` blocks start every ``stride`` blocks (default: ``interval``); the rest is kept.

    The last segment may be shorter. interval 2, stride 4 over 7 blocks: 0–1, 4–5 recomputed; 2, 3, 6 kept.
    """
    stride = interval if stride is None else stride
    _check(depth, interval, stride)
    segments = tuple(i // stride if i % stride < interval else None for i in range(depth))
    return StackSchedule(tuple(KEPT if s is None else WHOLE for s in segments), segments)


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
