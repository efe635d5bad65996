"""Costs of a step from shapes alone: bytes as one traced forward shows them, times from FLOPs and a card's rates."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.measure.cards import Card
from lowtide.measure.held import trace_held
from lowtide.plan.costs import FORECAST, PLAIN, BlockFigures, BlockKind, StepCosts, Way
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL, Held, HeldTrace, ModuleCall, predict
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
    return StepCosts(
        kinds=forecaster.kinds(),
        stacks=forecaster.kind_names,
        resident_bytes=max(0, resident_bytes + trace.bytes_of(trace.glue & trace.live) + forecaster.shared_bytes()),
        link=card.link,
        host_limit_bytes=host_limit_bytes,
        source=FORECAST,
    )


def _trains(stacks: Sequence[ResolvedStack]) -> bool:
    """Whether the blocks' own weights get gradients, and not only those of an adapter."""
    weights = [weight for stack in stacks for _, block in stack.blocks for weight in block.parameters()]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return 2 * trained > sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class _Shape:
    """What a block computes and saves. feed_forward_share: of what it saves, in its feed-forward side."""

    flops: int
    kernel_flops: int
    feed_forward_flops: int
    saved_bytes: int
    feed_forward_bytes: int
    largest_bytes: int
    output_bytes: int


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
            computes = None if shape is None else (shape.flops, shape.kernel_flops, shape.feed_forward_flops)
            yield known.setdefault(computes, f"{stack}/{len(known)}")

    def _shape(self, calls: Sequence[ModuleCall]) -> _Shape:
        saved = set().union(*(call.all_saved for call in calls))
        forwards = [inner for call in calls for inner in call.outermost(FEED_FORWARD)]
        kernels = [inner for call in calls for inner in call.outermost(KERNEL)]
        sizes = [self.trace.sizes_bytes.get(storage, 0) for storage in saved]
        outputs = [self.trace.sizes_bytes.get(use.storage, 0) for call in calls for use in call.outputs]
        return _Shape(
            flops=sum(call.flops for call in calls),
            kernel_flops=sum(call.flops for call in kernels),
            feed_forward_flops=sum(call.flops for call in forwards),
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
        shape = self.shapes.get(blocks[0])
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
        forward_ms, backward_ms = self._plain_ms(shape)
        return BlockFigures(
            forward_ms=width * forward_ms,
            backward_ms=width * (backward_ms + self._again_ms(treatment, shape)),
            kept_bytes=kept,
            cpu_bytes=min(moved, copied),
            working_bytes=again + moved + gradients,
            copied_bytes=copied,
        )

    def _plain_ms(self, shape: _Shape) -> tuple[float, float]:
        """Frozen weights need the gradient of their input alone, which takes as long as the forward."""
        products = shape.flops - shape.kernel_flops
        backward = products * (2 if self.trains else 1) + shape.kernel_flops * _ATTENTION_BACKWARD
        return (
            self._ms(shape.flops, _TRAFFIC["forward"] * shape.saved_bytes),
            self._ms(backward, _TRAFFIC["backward"] * shape.saved_bytes),
        )

    def _again_ms(self, treatment: str, shape: _Shape) -> float:
        flops, size_bytes = {
            KEPT: (0, 0),
            FFN: (shape.feed_forward_flops, shape.feed_forward_bytes),
            WHOLE: (shape.flops, shape.saved_bytes),
            SELECTIVE: (shape.flops - shape.kernel_flops, shape.saved_bytes),
        }[treatment]
        return self._ms(flops, _TRAFFIC["forward"] * size_bytes)

    def _ms(self, flops: float, traffic_bytes: float) -> float:
        return 1e3 * (flops / self.card.flops_per_s + traffic_bytes / self.card.memory_bytes_per_s)

    @staticmethod
    def _median(values: Iterable[int]) -> int:
        return int(statistics.median_low(list(values)))


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
