"""What one training step costs, by kind of block and by treatment: what the planner chooses from. Pure arithmetic.

Blocks are of one kind when all their figures are equal; a U-shaped model has many kinds. Figures may be measured (a
few real steps for each treatment) or forecast (bytes from shapes, times from FLOPs): both come in as ``BlockFigures``.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from lowtide.plan.schedule import IN_SEGMENTS, KEPT, MOVES, TREATMENTS, reaches_in, word_of

MEASURED, FORECAST = "measured", "forecast"
"""Where the figures come from."""

Way = tuple[str, frozenset[str], int]
"""A treatment, what moves of it, and how many blocks it takes together."""
PLAIN: Way = (KEPT, frozenset(), 1)
ANY_BYTES = 2**60
COPYING = 0.1
"""Of the time of copies on the link, by how much a step takes longer though nobody waits for them: they take time of
the host, and share the device's memory. On an H200 it was 0.02 to 0.25 (`benchmarks/LOG.md`, 2026-12-01)."""


@dataclass(frozen=True)
class BlockFigures:
    """Some neighbouring blocks of one kind, treated in one way, in one step.

    forward_ms, backward_ms: with what is recomputed, without waits for copies (a receipt's ``exposed_copy_ms``).
    kept_bytes: held on the device from their forward to their backward. What all blocks share (text states, rotary
        tables) belongs to the residents instead, since it counts once.
    cpu_bytes: what waits in CPU memory instead. copied_bytes: copied out, and back; None: the same.
    working_bytes: the most that their forward or their backward has on the device above ``kept_bytes``: what is
        recomputed, what has come back, gradients on the way.
    relief_bytes, gradient_bytes: see TreatmentCost.
    """

    forward_ms: float
    backward_ms: float
    kept_bytes: int
    cpu_bytes: int = 0
    working_bytes: int = 0
    copied_bytes: int | None = None
    relief_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True)
class TreatmentCost:
    """What one way to treat ``blocks`` neighbouring blocks of a kind costs, beside the plain run's time.

    treatment, moves: as in plan.schedule. blocks: width of the segment; more than one only where blocks are recomputed
    whole. The bytes are those of ``BlockFigures``, of all the blocks together.
    relief_bytes: what its backward is through with when it comes to the attention side. Until then no copies for other
        blocks lie beside it: what was brought back is its own, which it reads there. What moves nothing has such a
        relief only where it runs last, and wakes the way back there: where the schedule reaches into blocks.
    relief_share, relief_most_bytes: of that, what is believed.
    gradient_bytes: of its weights' gradients that are among the residents, but not there until its backward makes them.
    """

    treatment: str
    moves: frozenset[str] = frozenset()
    blocks: int = 1
    extra_forward_ms: float = 0.0
    extra_backward_ms: float = 0.0
    kept_bytes: int = 0
    cpu_bytes: int = 0
    working_bytes: int = 0
    copied_bytes: int = 0
    relief_bytes: int = 0
    gradient_bytes: int = 0
    relief_share: float = 1.0
    relief_most_bytes: int = ANY_BYTES

    def __post_init__(self) -> None:
        if self.treatment not in TREATMENTS:
            raise ValueError(f"unknown treatment {self.treatment!r}; allowed: {', '.join(TREATMENTS)}")
        if not self.moves <= MOVES[self.treatment]:
            raise ValueError(
                f"{self.word}: of a {self.treatment} block can move {', '.join(sorted(MOVES[self.treatment]))}"
            )
        if self.blocks < 1 or (self.blocks > 1 and self.treatment not in IN_SEGMENTS):
            raise ValueError(f"{self.word}: a segment of {self.blocks} blocks")
        if self.copied_bytes < self.cpu_bytes or (self.copied_bytes and not self.moves):
            raise ValueError(f"{self.word}: {self.cpu_bytes} bytes in CPU memory, {self.copied_bytes} bytes copied")
        _check_not_negative(self)

    @property
    def way(self) -> Way:
        return self.treatment, self.moves, self.blocks

    @property
    def word(self) -> str:
        """As ``plan.schedule.mixed`` takes it."""
        return word_of(self.treatment, self.moves)

    @property
    def extra_ms(self) -> float:
        return self.extra_forward_ms + self.extra_backward_ms

    @property
    def net_bytes(self) -> int:
        """What it keeps, less the gradients that have their room among the residents already: may be negative."""
        return self.kept_bytes - self.gradient_bytes

    @property
    def at_work_bytes(self) -> int:
        """Its working set, and the gradients that its backward makes."""
        return self.working_bytes + self.gradient_bytes

    @property
    def reaches_in(self) -> bool:
        return reaches_in(self.treatment, self.moves)

    def in_flight(self, all_bytes: int, wakes: bool) -> int:
        """Of all bytes in flight, those that need room beside its working set. wakes: it runs last, and wakes the way
        back at its attention."""
        relief_bytes = min(self.relief_bytes, self.working_bytes) if self.moves or wakes else 0
        return max(0, all_bytes - min(int(self.relief_share * relief_bytes), self.relief_most_bytes))


@dataclass(frozen=True)
class BlockKind:
    """Times of one block in a plain run, and the ways to treat it. ``treatments`` has the plain one among them."""

    forward_ms: float
    backward_ms: float
    treatments: tuple[TreatmentCost, ...]

    def __post_init__(self) -> None:
        _check_not_negative(self)
        if len(self.by_way) != len(self.treatments):
            raise ValueError("two costs for one way to treat a block")
        if PLAIN not in self.by_way or self.by_way[PLAIN].extra_ms:
            raise ValueError("a kind of block needs the cost of keeping it as it is, which takes no extra time")

    @cached_property
    def by_way(self) -> Mapping[Way, TreatmentCost]:
        return {cost.way: cost for cost in self.treatments}

    @property
    def plain(self) -> TreatmentCost:
        return self.by_way[PLAIN]

    def copying_ms(self, cost: TreatmentCost) -> float:
        """By how much a step takes longer for what one of the treatments moves, though nobody waits for it."""
        staying = self.by_way.get((cost.treatment, frozenset(), cost.blocks))
        return max(0.0, cost.extra_ms - staying.extra_ms) if staying is not None and cost.moves else 0.0

    def with_gradients(self, gradient_bytes: int) -> "BlockKind":
        """gradient_bytes: of one block."""
        costs = (replace(cost, gradient_bytes=cost.blocks * gradient_bytes) for cost in self.treatments)
        return replace(self, treatments=tuple(costs))

    def with_relief(self, share: float, most_bytes: int) -> "BlockKind":
        costs = (replace(cost, relief_share=share, relief_most_bytes=most_bytes) for cost in self.treatments)
        return replace(self, treatments=tuple(costs))

    @classmethod
    def from_figures(cls, figures: Mapping[Way, BlockFigures]) -> "BlockKind":
        """From the figures of each way, that of PLAIN among them.

        A treatment that came out faster than the plain run takes no extra time: that was noise.
        """
        plain = figures[PLAIN]
        costs = tuple(_cost_of(way, treated, plain) for way, treated in figures.items())
        return cls(plain.forward_ms, plain.backward_ms, costs)


def _cost_of(way: Way, treated: BlockFigures, plain: BlockFigures) -> TreatmentCost:
    treatment, moves, blocks = way
    return TreatmentCost(
        treatment,
        moves,
        blocks,
        extra_forward_ms=max(0.0, treated.forward_ms - blocks * plain.forward_ms),
        extra_backward_ms=max(0.0, treated.backward_ms - blocks * plain.backward_ms),
        kept_bytes=treated.kept_bytes,
        cpu_bytes=treated.cpu_bytes,
        working_bytes=treated.working_bytes,
        copied_bytes=treated.cpu_bytes if treated.copied_bytes is None else treated.copied_bytes,
        relief_bytes=treated.relief_bytes,
        gradient_bytes=treated.gradient_bytes,
    )


@dataclass(frozen=True)
class LinkRates:
    """Pinned copies between the device and CPU memory. The way back may be the slower one: they are two figures."""

    out_gib_per_s: float
    back_gib_per_s: float

    def __post_init__(self) -> None:
        if not (self.out_gib_per_s > 0 and self.back_gib_per_s > 0):
            raise ValueError(f"a link needs two rates above 0, not {self.out_gib_per_s} and {self.back_gib_per_s}")

    def out_ms(self, size_bytes: int) -> float:
        return size_bytes / 2**30 / self.out_gib_per_s * 1e3

    def back_ms(self, size_bytes: int) -> float:
        return size_bytes / 2**30 / self.back_gib_per_s * 1e3


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of one kind in one stack. first: index of the first of them."""

    stack: str
    kind: str
    first: int
    depth: int


@dataclass(frozen=True)
class StepCosts:
    """All that a plan depends on.

    kinds: the kinds of block by name. stacks: the kind of every block, by stack, in the order of their calls.
    resident_bytes: on the device throughout backward, or at its end at least, whatever the plan: weights, gradients,
        optimizer states, EMA, what the code outside of the blocks saved, what blocks share, the allocator's overhead.
    elsewhere_bytes: the peak outside of the blocks (the loss, the optimizer's step, an encoder): no plan lowers it.
    other_ms: time of a step outside of the blocks.
    link: None: nothing can move. host_limit_bytes: how much may wait in CPU memory; None: no limit.
    source: MEASURED or FORECAST.
    in_flight_share: of the bytes that may be in flight, what is there where backward needs the most.
    in_flight_known_bytes: of how many that share is known. All beyond them count.
    tokens: the most that a block's attention is asked for, where that is known. No plan depends on it.
    """

    kinds: Mapping[str, BlockKind]
    stacks: Mapping[str, tuple[str, ...]]
    resident_bytes: int
    elsewhere_bytes: int = 0
    other_ms: float = 0.0
    link: LinkRates | None = None
    host_limit_bytes: int | None = None
    source: str = field(default=MEASURED)
    in_flight_share: float = 1.0
    in_flight_known_bytes: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        _check_not_negative(self)
        if not any(self.stacks.values()):
            raise ValueError("a step without blocks has nothing to plan")
        for name, kinds in self.stacks.items():
            if unknown := set(kinds) - set(self.kinds):
                raise ValueError(f"stack {name!r} has blocks of kind {sorted(unknown)[0]!r}, which has no costs")

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for name, kinds in self.stacks.items() for run in _runs(name, kinds))

    @property
    def plain_ms(self) -> float:
        """Time of a step in which nothing is recomputed and nothing moves."""
        blocks = (self.kinds[kind] for kinds in self.stacks.values() for kind in kinds)
        return self.other_ms + sum(kind.forward_ms + kind.backward_ms for kind in blocks)

    def in_flight(self, bound_bytes: int) -> int:
        """What counts of the bytes that may be in flight."""
        return bound_bytes - round((1 - self.in_flight_share) * min(bound_bytes, self.in_flight_known_bytes))

    @property
    def gradient_bytes(self) -> Mapping[str, int]:
        """Of one block, by kind."""
        return {name: kind.plain.gradient_bytes for name, kind in self.kinds.items()}

    def with_gradients(self, of_kinds: Mapping[str, int]) -> "StepCosts":
        """With so many bytes of gradients, by kind, that are not there before the backward of a block. None where they
        lie there throughout, as when they add up over several backwards."""
        kinds = {name: kind.with_gradients(of_kinds.get(name, 0)) for name, kind in self.kinds.items()}
        return replace(self, kinds=kinds)

    def with_relief(self, share: float, most_bytes: int = ANY_BYTES) -> "StepCosts":
        """With so much of every relief believed, and no more bytes than that."""
        kinds = {name: kind.with_relief(share, most_bytes) for name, kind in self.kinds.items()}
        return replace(self, kinds=kinds)

    def calibrated(self, predicted_peak_bytes: int, measured_peak_bytes: int) -> "StepCosts":
        """With the error of one prediction put down to the residents."""
        resident_bytes = self.resident_bytes + measured_peak_bytes - predicted_peak_bytes
        return replace(self, resident_bytes=max(0, resident_bytes))


def _runs(stack: str, kinds: tuple[str, ...]) -> Iterator[Run]:
    first = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[first]:
            yield Run(stack, kinds[first], first, index - first)
            first = index


def _check_not_negative(figures: object) -> None:
    for entry in fields(figures):  # type: ignore[arg-type]
        value = vars(figures)[entry.name]
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{entry.name}: {value} is no amount")
