"""Which bytes a schedule holds between forward and backward, from a trace of one plain forward. Pure arithmetic.

The unit is the storage: each counts once, whole, however many views of it are saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lowtide.plan.schedule import FFN, WHOLE, Schedule


@dataclass(frozen=True)
class TensorUse:
    """A tensor that a call took or gave.

    tensor: names the object. storage: names its storage. elements: how many the tensor has.
    """

    tensor: int
    storage: int
    elements: int
    requires_grad: bool


@dataclass(frozen=True)
class ModuleCall:
    """One call of a block, or of a feed-forward module inside one.

    stack, index: of the block; of a feed-forward module, its chain and its place in it.
    arguments, outputs: its tensors. saved: storages that autograd saved in it, those of ``inner`` left out.
    inner: the calls of its feed-forward modules, in order.
    """

    name: str
    stack: str
    index: int
    arguments: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    saved: frozenset[int]
    inner: tuple["ModuleCall", ...] = ()

    @property
    def all_saved(self) -> frozenset[int]:
        return self.saved.union(*(call.saved for call in self.inner))


@dataclass(frozen=True)
class HeldTrace:
    """One plain forward: block calls in order, and what was saved outside of them.

    live: the saved storages that the graph of the outputs still holds when the forward is over; a branch whose result
    nobody uses (the text stream of a last block, say) is gone by then.
    sizes_bytes: of every storage, parameters and buffers left out (they stay anyway, so they count nothing).
    """

    calls: tuple[ModuleCall, ...]
    glue: frozenset[int]
    live: frozenset[int]
    sizes_bytes: Mapping[int, int]

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.sizes_bytes.get(storage, 0) for storage in set(storages))


@dataclass(frozen=True)
class Held:
    """A prediction for one step, in bytes of distinct storages.

    plain_bytes: held between forward and backward without checkpointing. held_bytes: held with the schedule.
    kept_bytes, recomputed_bytes: of the blocks, as receipts count them: what kept blocks saved and the boundaries of
    segments; what was dropped and is no boundary. They count at the call, so a branch that dies unused is in them.
    segments: names of the calls that are recomputed together; feed-forward modules by their own names.
    """

    plain_bytes: int
    held_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    segments: tuple[tuple[str, ...], ...]


@dataclass
class _Segment:
    """Calls that are recomputed as one: what came from outside, and what was made inside."""

    planned: int | None
    next_index: int
    calls: list[ModuleCall] = field(default_factory=list)
    external: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    drops: bool = False

    @property
    def saved(self) -> set[int]:
        return set().union(*(call.all_saved for call in self.calls))

    def takes(self, planned: int | None, call: ModuleCall) -> bool:
        return planned == self.planned and call.index == self.next_index and self._carries_on(call)

    def add(self, call: ModuleCall) -> None:
        self.calls.append(call)
        self.external |= {use.tensor: use.storage for use in call.arguments if use.tensor not in self.made}
        self.made |= {use.tensor for use in call.outputs}
        self.next_index = call.index + 1

    def _carries_on(self, call: ModuleCall) -> bool:
        """The largest argument with a gradient that is not external already was made inside."""
        candidates = [use for use in call.arguments if use.requires_grad and use.tensor not in self.external]
        largest = max(candidates, key=lambda use: use.elements, default=None)
        return largest is not None and largest.tensor in self.made


def predict(trace: HeldTrace, schedule: Schedule) -> Held:
    """Bytes held between forward and backward, and the segments that really form, under ``schedule``."""
    segments = _segments(trace, schedule)
    needed = [segment for segment in segments if segment.saved & trace.live]
    recomputed = {id(call) for segment in segments for call in segment.calls}
    kept = set().union(*(_saved(call, recomputed, dropped=False) for call in trace.calls))
    dropped = set().union(*(_saved(call, recomputed, dropped=True) for call in trace.calls))
    boundaries = _boundaries(segments)
    plain = trace.glue.union(*(call.all_saved for call in trace.calls))
    return Held(
        plain_bytes=trace.bytes_of(plain & trace.live),
        held_bytes=trace.bytes_of((trace.glue | kept) & trace.live | _boundaries(needed)),
        kept_bytes=trace.bytes_of(kept | boundaries),
        recomputed_bytes=trace.bytes_of(dropped - kept - boundaries),
        segments=tuple(tuple(call.name for call in segment.calls) for segment in needed),
    )


def _boundaries(segments: Iterable["_Segment"]) -> set[int]:
    return {storage for segment in segments for storage in segment.external.values()}


def _saved(call: ModuleCall, recomputed: set[int], dropped: bool) -> set[int]:
    """The storages that a block call saved and that its treatment keeps, or drops."""
    if id(call) in recomputed:
        return set(call.all_saved) if dropped else set()
    inner = [other.saved for other in call.inner if (id(other) in recomputed) is dropped]
    return set().union(*inner, () if dropped else call.saved)


def _segments(trace: HeldTrace, schedule: Schedule) -> list[_Segment]:
    formed: list[_Segment] = []
    running: dict[str, _Segment] = {}
    for call in trace.calls:
        stack = schedule.stacks[call.stack]
        treatment = stack.treatments[call.index]
        if treatment == WHOLE:
            _place(call, stack.segments[call.index], running, formed)
            _settle(call, bool(call.all_saved), running)
        elif treatment == FFN:
            _place_feed_forward(call, trace, formed)
    return [segment for segment in formed if segment.drops]


def _place_feed_forward(block: ModuleCall, trace: HeldTrace, formed: list[_Segment]) -> None:
    last = {call.stack: call.index for call in block.inner}
    running: dict[str, _Segment] = {}
    for call in block.inner:
        segment = _place(call, None, running, formed)
        # Alone at the end of its chain, a module that saved weights only would hold its input for nothing.
        alone = len(segment.calls) == 1 and call.index == last[call.stack]
        _settle(call, any(storage in trace.sizes_bytes or not alone for storage in call.saved), running)


def _place(call: ModuleCall, planned: int | None, running: dict[str, _Segment], formed: list[_Segment]) -> _Segment:
    """Add a call to the open segment of its stack, or to a new one."""
    segment = running.get(call.stack)
    if segment is None or not segment.takes(planned, call):
        segment = running[call.stack] = _Segment(planned, call.index)
        formed.append(segment)
    segment.add(call)
    return segment


def _settle(call: ModuleCall, drops: bool, running: dict[str, _Segment]) -> None:
    """A call that drops nothing ends its segment."""
    if drops:
        running[call.stack].drops = True
    else:
        del running[call.stack]
