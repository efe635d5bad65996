"""Costs of a step from shapes alone: bytes as one traced forward shows them, times from FLOPs and a card's rates."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.measure.cards import HOST_US, Card
from lowtide.measure.held import trace_held
from lowtide.plan.costs import COPYING, FORECAST, PLAIN, BlockFigures, BlockKind, StepCosts, Way
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL, Held, HeldTrace, ModuleCall, Work, predict
from lowtide.plan.schedule import (
    ATTENTION,
    BOUNDARY,
    FFN,
    KEPT,
    MIN_BYTES,
    SAVED,
    SELECTIVE,
    WHOLE,
    Schedule,
    StackSchedule,
    feed_forwards,
    keep_all,
    whole_blocks,
)
from lowtide.runtime.resolve import ResolvedStack

WIDTHS = (1, 2, 3, 4)
"""Blocks that a segment may have."""
_ATTENTION_BACKWARD = (
    2.5  # of its forward: two products more, and the scores once more (FlashAttention, arXiv:2205.14135)
)
_GRADIENTS = 2  # of the largest intermediate, coming and going
_TRAFFIC = {"forward": 2, "backward": 4}
"""How often what a block saves passes through the device's memory, for all that is no matrix product."""

_BACKWARD_OPERATORS = 2
"""Dispatched for each one that autograd recorded."""
_RELIEF = 0.5
"""Of the room that copies in flight are spared while backward is at a feed-forward side: 0.2 to 1 by 44 schedules on
H200s, as attention sides may need as much (``benchmarks/LOG.md``, 2026-12-01)."""

Block = tuple[str, int]


def forecast(
    model: nn.Module,
    stacks: Sequence[ResolvedStack],
    inputs: Mapping[str, Any],
    card: Card,
    resident_bytes: int,
    *,
    host_limit_bytes: int | None = None,
    min_bytes: int = MIN_BYTES,
) -> StepCosts:
    """Costs of one step of a model that stands on the meta device, as it is trained (adapters in, frozen what is).

    inputs: arguments of its forward (``build_inputs(device="meta")``). resident_bytes: see ``residents``. A forecast of
    bytes is exact but for what is at work in backward, which is estimated; times are rough. Raises ConfigError where
    the forward cannot run on the meta device.
    """
    trace = trace_held(model, stacks, inputs, as_on_gpu=True)
    forecaster = _Forecaster(
        trace, {stack.name: len(stack.blocks) for stack in stacks}, card, _trains(stacks), min_bytes
    )
    costs = StepCosts(
        kinds=forecaster.kinds(),
        stacks=forecaster.kind_names,
        resident_bytes=max(0, resident_bytes + trace.bytes_of(trace.glue & trace.live) + forecaster.shared_bytes()),
        other_ms=forecaster.other_ms(),
        link=card.link,
        host_limit_bytes=host_limit_bytes,
        source=FORECAST,
        tokens=trace.tokens,
    )
    return costs.with_relief(_RELIEF)


def _trains(stacks: Sequence[ResolvedStack]) -> bool:
    """Whether the blocks' own weights get gradients, and not only those of an adapter."""
    weights = [weight for stack in stacks for _, block in stack.blocks for weight in block.parameters()]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return 2 * trained > sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class _Shape:
    """What a block computes and saves; the parts in its attention kernels and its feed-forward side."""

    work: Work
    kernels: Work
    feed_forward: Work
    saved_bytes: int
    feed_forward_bytes: int
    largest_bytes: int
    output_bytes: int

    @property
    def flops(self) -> tuple[int, ...]:
        return self.work.flops, self.kernels.flops, self.feed_forward.flops


@dataclass(frozen=True)
class _Time:
    """The device works while the host dispatches what is next, so the slower one decides."""

    device_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        return max(self.device_ms, self.host_ms)

    def __add__(self, other: "_Time") -> "_Time":
        return _Time(self.device_ms + other.device_ms, self.host_ms + other.host_ms)


class _Forecaster:
    def __init__(self, trace: HeldTrace, depths: Mapping[str, int], card: Card, trains: bool, min_bytes: int) -> None:
        self.trace = trace
        self.depths = depths
        self.card = card
        self.trains = trains
        self.min_bytes = min_bytes
        self.calls: dict[Block, list[ModuleCall]] = {}
        for call in trace.calls:
            self.calls.setdefault((call.stack, call.index), []).append(call)
        self.shapes = {block: self._shape(calls) for block, calls in self.calls.items()}
        self.kind_names = {stack: tuple(self._names(stack, depth)) for stack, depth in depths.items()}
        self.held = {way: self._held(way) for way in self._ways()}

    def kinds(self) -> dict[str, BlockKind]:
        """Of every kind: its ways with the median of what its blocks hold."""
        return {
            name: BlockKind.from_figures(dict(self._figures(blocks, self.held)))
            for name, blocks in self._members().items()
        }

    def shared_bytes(self) -> int:
        """The most that all blocks hold beyond the medians of their kinds under any way: by one of them for all."""
        members = [blocks for blocks in self._members().values() if blocks[0] in self.shapes]
        return max(
            sum(
                sum(held.blocks[block].kept_bytes for block in blocks)
                - len(blocks) * self._median(held.blocks[block].kept_bytes for block in blocks)
                for blocks in members
            )
            for (_, _, width), held in self.held.items()
            if width == 1
        )

    def _members(self) -> dict[str, list[Block]]:
        members: dict[str, list[Block]] = {}
        for stack, names in self.kind_names.items():
            for index, name in enumerate(names):
                members.setdefault(name, []).append((stack, index))
        return members

    def _names(self, stack: str, depth: int) -> Iterator[str]:
        """Blocks that compute the same are of one kind; one that was not called is a kind of its own."""
        known: dict[tuple[int, ...] | None, str] = {}
        for index in range(depth):
            shape = self.shapes.get((stack, index))
            computes = None if shape is None else shape.flops
            yield known.setdefault(computes, f"{stack}/{len(known)}")

    def _shape(self, calls: Sequence[ModuleCall]) -> _Shape:
        saved = set().union(*(call.all_saved for call in calls))
        forwards = [inner for call in calls for inner in call.outermost(FEED_FORWARD)]
        kernels = [inner for call in calls for inner in call.outermost(KERNEL)]
        sizes = [self.trace.sizes_bytes.get(storage, 0) for storage in saved]
        outputs = [self.trace.sizes_bytes.get(use.storage, 0) for call in calls for use in call.outputs]
        return _Shape(
            work=_work(calls),
            kernels=_work(kernels),
            feed_forward=_work(forwards),
            saved_bytes=sum(sizes),
            feed_forward_bytes=self.trace.bytes_of(set().union(*(call.all_saved for call in forwards), set())),
            largest_bytes=max(sizes, default=0),
            output_bytes=max(outputs, default=0),
        )

    def _ways(self) -> Iterator[Way]:
        """What some block of the model has: each is another uniform schedule to predict."""
        calls = [call for calls in self.calls.values() for call in calls]
        attends = any(any(True for _ in call.outermost(ATTENTION_SIDE)) for call in calls)
        feeds = any(any(True for _ in call.outermost(FEED_FORWARD)) for call in calls)
        selects = any(kernel.results for call in calls for kernel in call.outermost(KERNEL))
        attention = [frozenset({ATTENTION})] if attends else []
        boundary = frozenset({BOUNDARY})
        yield from ((KEPT, moves, 1) for moves in (frozenset(), *attention, frozenset({SAVED})))
        if feeds:
            more = [boundary | moves for moves in attention]
            yield from ((FFN, moves, 1) for moves in (frozenset(), boundary, *attention, *more, boundary | {SAVED}))
        for width in WIDTHS:
            yield from ((WHOLE, moves, width) for moves in (frozenset(), boundary))
        if selects:
            yield from ((SELECTIVE, moves, 1) for moves in (frozenset(), boundary, boundary | {ATTENTION}))

    def _held(self, way: Way) -> Held:
        schedule = Schedule({stack: _uniform(depth, way) for stack, depth in self.depths.items()})
        return predict(self.trace, schedule, self.min_bytes)

    def _figures(self, blocks: Sequence[Block], held: Mapping[Way, Held]) -> Iterator[tuple[Way, BlockFigures]]:
        shape = self.shapes.get(blocks[len(blocks) // 2])  # of the first block autograd may record less
        if shape is None:  # never called: nothing to treat, nothing to hold
            yield PLAIN, BlockFigures(0.0, 0.0, 0)
            return
        for way, result in held.items():
            groups = list(_groups(blocks, way))
            if groups and self._has(blocks[0], way):
                yield way, self._figure(way, shape, groups, result)

    def _has(self, block: Block, way: Way) -> bool:
        """Whether the block has what the way treats and moves; else the way is another one under a wrong name."""
        treatment, moves, _ = way
        calls = self.calls[block]
        if treatment == FFN and not any(True for call in calls for _ in call.outermost(FEED_FORWARD)):
            return False
        if treatment == SELECTIVE and not any(k.results for call in calls for k in call.outermost(KERNEL)):
            return False
        attends = any(True for call in calls for _ in call.outermost(ATTENTION_SIDE))
        return attends or ATTENTION not in moves

    def _figure(self, way: Way, shape: _Shape, groups: Sequence[Sequence[Block]], held: Held) -> BlockFigures:
        kept, moved, copied = (
            self._median(sum(getattr(held.blocks[block], name) for block in group) for group in groups)
            for name in ("kept_bytes", "cpu_bytes", "copied_bytes")
        )
        saved = self._median(
            self.trace.bytes_of(s for block in group for call in self.calls[block] for s in call.all_saved)
            for group in groups
        )
        treatment, _, width = way
        again = max(0, saved - kept - moved) if treatment != KEPT else 0
        gradients = _GRADIENTS * shape.largest_bytes + shape.output_bytes
        forward, backward = self._forward(shape.work, shape.saved_bytes), self._backward(shape)
        copying_ms = COPYING * self.card.link.out_ms(copied)
        return BlockFigures(
            forward_ms=width * forward.ms,
            backward_ms=width * (backward + self._again(treatment, shape)).ms + copying_ms,
            kept_bytes=kept,
            cpu_bytes=min(moved, copied),
            working_bytes=again + moved + gradients,
            copied_bytes=copied,
            relief_bytes=self._relief_bytes(way, groups),
        )

    def _relief_bytes(self, way: Way, groups: Sequence[Sequence[Block]]) -> int:
        """Of blocks that are not run again whole, and read what moved, if anything did, at their attention side."""
        treatment, moves, _ = way
        attending = self.held.get((KEPT, frozenset({ATTENTION}), 1))
        if treatment not in (KEPT, FFN) or moves == {BOUNDARY} or attending is None:
            return 0
        blocks = [block for group in groups for block in group if len(self.calls[block]) == 1]
        if len(blocks) < len(groups):
            return 0
        after = self._median(self.trace.bytes_of(self.calls[block][0].saved_after_attention) for block in blocks)
        read_there = self._median(attending.blocks[block].cpu_bytes for block in blocks)
        return min(after, read_there) if moves else after

    def _forward(self, work: Work, saved_bytes: int) -> "_Time":
        return self._time(work.flops, _TRAFFIC["forward"] * saved_bytes, work.operators)

    def _backward(self, shape: _Shape) -> "_Time":
        """Frozen weights need the gradient of their input alone, which takes as long as the forward."""
        products = shape.work.flops - shape.kernels.flops
        flops = products * (2 if self.trains else 1) + shape.kernels.flops * _ATTENTION_BACKWARD
        operators = _BACKWARD_OPERATORS * shape.work.recorded
        return self._time(flops, _TRAFFIC["backward"] * shape.saved_bytes, operators)

    def _again(self, treatment: str, shape: _Shape) -> "_Time":
        work, saved_bytes = {
            KEPT: (Work(), 0),
            FFN: (shape.feed_forward, shape.feed_forward_bytes),
            WHOLE: (shape.work, shape.saved_bytes),
            SELECTIVE: (shape.work - shape.kernels, shape.saved_bytes),
        }[treatment]
        return self._forward(work, saved_bytes)

    def other_ms(self) -> float:
        """Of the forward and the backward outside of the blocks."""
        work = self.trace.outside
        saved_bytes = self.trace.bytes_of(self.trace.glue)
        backward = self._time(
            work.flops * (2 if self.trains else 1),
            _TRAFFIC["backward"] * saved_bytes,
            _BACKWARD_OPERATORS * work.recorded,
        )
        return self._forward(work, saved_bytes).ms + backward.ms

    def _time(self, flops: float, traffic_bytes: float, operators: int) -> "_Time":
        device_ms = 1e3 * (flops / self.card.flops_per_s + traffic_bytes / self.card.memory_bytes_per_s)
        return _Time(device_ms, operators * HOST_US / 1e3)

    @staticmethod
    def _median(values: Iterable[int]) -> int:
        return int(statistics.median_low(list(values)))


def _work(calls: Iterable[ModuleCall]) -> Work:
    return sum((call.work for call in calls), Work())


def _uniform(depth: int, way: Way) -> StackSchedule:
    treatment, moves, width = way
    if treatment == KEPT:
        return keep_all(depth).moving(moves)
    if treatment == FFN:
        return feed_forwards(depth).moving(moves)
    return whole_blocks(depth, width, treatment=treatment).moving(moves)


def _groups(blocks: Sequence[Block], way: Way) -> Iterator[tuple[Block, ...]]:
    """The segments of a uniform schedule that lie within a kind."""
    width = way[2]
    of_kind = set(blocks)
    for stack, index in blocks:
        group = tuple((stack, index + offset) for offset in range(width))
        if index % width == 0 and of_kind.issuperset(group):
            yield group
