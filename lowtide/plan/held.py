"""Which bytes a schedule holds between forward and backward, from a trace of one plain forward. Pure arithmetic.

The unit is the storage: each counts once, whole, however many views of it are saved. In blocks of which something
moves, who wants a storage first decides: one that is held on the device stays there when an attention side saves it
later, and one that has moved to CPU memory is not held on the device again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, IN_SEGMENTS, MIN_BYTES, SAVED, SELECTIVE, Schedule

BLOCK, FEED_FORWARD, ATTENTION_SIDE, KERNEL = "block", "feed-forward", "attention-side", "kernel"
"""What a traced call is: a block; a module of its feed-forward or attention side; an attention kernel."""


@dataclass(frozen=True)
class Work:
    """What runs. flops: floating-point operations; a multiply-add is two. operators: dispatched, each at a cost to the
    host. recorded: those of them that autograd records, whose backward dispatches others."""

    flops: int = 0
    operators: int = 0
    recorded: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.operators + other.operators, self.recorded + other.recorded)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.flops - other.flops, self.operators - other.operators, self.recorded - other.recorded)


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
    """One call of a block, of a module of one of its sides, or of an attention kernel in it.

    stack, index: of the block; of a feed-forward module, its chain and its place in it.
    arguments, outputs: its tensors. steps: the storages that autograd saved in it and the calls inside it, in order.
    results: of an attention kernel, what is kept so that it need not run again: its output, the log-sum-exp and the
    like; empty where it is recomputed.
    carry: the tensors among a block's arguments that decide whether a segment goes on, where its row names them.
    work: of its forward, the calls inside it included.
    """

    name: str
    stack: str
    index: int
    arguments: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    steps: tuple["int | ModuleCall", ...]
    kind: str = BLOCK
    results: tuple[int, ...] = ()
    carry: tuple[int, ...] = ()
    work: Work = Work()

    @property
    def flops(self) -> int:
        return self.work.flops

    @property
    def saved(self) -> frozenset[int]:
        """Without what the calls inside it saved."""
        return frozenset(step for step in self.steps if isinstance(step, int))

    @property
    def inner(self) -> tuple["ModuleCall", ...]:
        return tuple(step for step in self.steps if isinstance(step, ModuleCall))

    @property
    def all_saved(self) -> frozenset[int]:
        return self.saved.union(*(call.all_saved for call in self.inner))

    @property
    def saved_after_attention(self) -> frozenset[int]:
        """Storages that are first saved after its attention side: backward is through with them when it comes there.
        Empty where it has no such side."""
        places = [place for place, step in enumerate(self.steps) if _attends(step)]
        if not places:
            return frozenset()
        before, after = (_saved_in(steps) for steps in (self.steps[: places[-1] + 1], self.steps[places[-1] + 1 :]))
        return after - before

    def outermost(self, kind: str) -> Iterator["ModuleCall"]:
        """The calls of a kind at any depth inside this one, those inside another of the same kind left out."""
        for call in self.inner:
            if call.kind == kind:
                yield call
            else:
                yield from call.outermost(kind)


def _attends(step: "int | ModuleCall") -> bool:
    return isinstance(step, ModuleCall) and (
        step.kind == ATTENTION_SIDE or any(True for _ in step.outermost(ATTENTION_SIDE))
    )


def _saved_in(steps: Iterable["int | ModuleCall"]) -> frozenset[int]:
    return frozenset().union(*(frozenset({step}) if isinstance(step, int) else step.all_saved for step in steps))


@dataclass(frozen=True)
class HeldTrace:
    """One plain forward: block calls in order, and what was saved outside of them.

    live: the saved storages that the graph of the outputs still holds when the forward is over; a branch whose result
    nobody uses (the text stream of a last block, say) is gone by then.
    sizes_bytes: of every storage, parameters and buffers left out (they stay anyway, so they count nothing).
    work: of the whole forward. tokens: the most that softmax attention in a block is asked for; 0: it has none.
    """

    calls: tuple[ModuleCall, ...]
    glue: frozenset[int]
    live: frozenset[int]
    sizes_bytes: Mapping[int, int]
    work: Work = Work()
    tokens: int = 0

    @property
    def outside(self) -> Work:
        """What runs outside of the blocks."""
        return self.work - sum((call.work for call in self.calls), Work())

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.sizes_bytes.get(storage, 0) for storage in set(storages))

    def piece_bytes(self, segment: Collection[str]) -> int:
        """What the calls of one segment, by name, save when all are run again: at most what its replay holds."""
        modules = [call for block in self.calls for call in (block, *block.outermost(FEED_FORWARD))]
        return self.bytes_of(storage for call in modules if call.name in segment for storage in call.all_saved)


@dataclass(frozen=True)
class BlockBytes:
    """Of one block of a stack; all its calls together. copied_bytes: out to CPU memory."""

    kept_bytes: int
    cpu_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Held:
    """A prediction for one step, in bytes of distinct storages.

    plain_bytes: held on the device between forward and backward without checkpointing. held_bytes: held there with the
    schedule. kept_bytes, cpu_bytes, recomputed_bytes: of the blocks, as receipts count them: what blocks saved and
    segments hold on the device; what waits in CPU memory instead; what was dropped and is neither. They count at the
    call, so a branch that dies unused is in them. d2h_bytes: what is copied out to CPU memory; more than cpu_bytes
    where a block of which nothing moves held it on the device first.
    segments: names of the calls that are recomputed together; feed-forward modules by their own names.
    blocks: by stack and index; a storage counts for the first block that keeps or moves it.
    """

    plain_bytes: int
    held_bytes: int
    kept_bytes: int
    cpu_bytes: int
    recomputed_bytes: int
    d2h_bytes: int
    segments: tuple[tuple[str, ...], ...]
    blocks: Mapping[tuple[str, int], BlockBytes]


@dataclass
class _Segment:
    """Calls that are recomputed as one: what came from outside, and what was made inside.

    kernels: whether the results of its attention kernels are held, too.
    """

    planned: int | None
    next_index: int
    kernels: bool
    calls: list[ModuleCall] = field(default_factory=list)
    external: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    dropping: set[int] = field(default_factory=set)  # calls, by id, that drop something
    holds: set[int] = field(default_factory=set)

    @property
    def saved(self) -> set[int]:
        return set().union(*(call.all_saved for call in self.calls))

    def takes(self, planned: int | None, call: ModuleCall) -> bool:
        return planned == self.planned and call.index == self.next_index and self._carries_on(call)

    def add(self, call: ModuleCall) -> None:
        self.calls.append(call)
        self.external |= {use.tensor: use.storage for use in call.arguments if use.tensor not in self.made}
        # A block may return what it was given: that still came from outside.
        self.made |= {use.tensor for use in call.outputs} - self.external.keys()
        self.next_index = call.index + 1

    def _carries_on(self, call: ModuleCall) -> bool:
        """The carry that the row names, or else the largest argument with a gradient that is not external already, was
        made inside."""
        if call.carry:
            return self.made.issuperset(call.carry)
        candidates = [use for use in call.arguments if use.requires_grad and use.tensor not in self.external]
        largest = max(candidates, key=lambda use: use.elements, default=None)
        return largest is not None and largest.tensor in self.made


def predict(trace: HeldTrace, schedule: Schedule, min_bytes: int = MIN_BYTES) -> Held:
    """Bytes held between forward and backward, and the segments that really form, under ``schedule``.

    min_bytes: a smaller storage never moves to CPU memory, whatever the schedule says.
    """
    segments = _segments(trace, schedule)
    needed = [segment for segment in segments if segment.saved & trace.live and segment.dropping]
    books = _Books(trace, min_bytes, segments, schedule)
    blocks: dict[tuple[str, int], BlockBytes] = {}
    for call in trace.calls:
        stack = schedule.stacks[call.stack]
        before = books.totals()
        books.enter(call, stack.moves[call.index])
        sofar = blocks.get((call.stack, call.index), BlockBytes(0, 0, 0))
        blocks[call.stack, call.index] = books.since(before, sofar)
    plain = trace.glue.union(*(call.all_saved for call in trace.calls))
    held_by_segments = set().union(*(segment.holds for segment in needed))
    return Held(
        plain_bytes=trace.bytes_of(plain & trace.live),
        held_bytes=trace.bytes_of((trace.glue | books.saved) & trace.live | held_by_segments),
        kept_bytes=books.kept_bytes,
        cpu_bytes=books.moved_bytes,
        recomputed_bytes=trace.bytes_of(books.dropped - books.kept - books.moved),
        d2h_bytes=books.d2h_bytes,
        segments=tuple(tuple(call.name for call in segment.calls) for segment in needed),
        blocks=blocks,
    )


class _Place(Enum):
    """What becomes of a storage that is saved: it stays; it stays unless it has moved already; it moves if it may."""

    STAYS = auto()
    SHARED = auto()
    MOVES = auto()


class _Books:
    """Follows the calls of a forward and enters where each storage goes.

    saved: on the device, by the graph. kept, moved, dropped: as receipts count, where the first entry decides between
    kept and moved.
    """

    def __init__(self, trace: HeldTrace, min_bytes: int, segments: Iterable[_Segment], schedule: Schedule) -> None:
        self.saved: set[int] = set()
        self.kept: set[int] = set()
        self.moved: set[int] = set()
        self.dropped: set[int] = set()
        self.d2h_bytes = self.kept_bytes = self.moved_bytes = 0
        self._sizes = trace.sizes_bytes
        self._min_bytes = min_bytes
        self._any_moves = schedule.moves_anything
        self._at_the_end = _needed_at_once(schedule)
        self._segment_of = {id(call): segment for segment in segments for call in segment.calls}
        self._in_cpu_memory: set[int] = set()
        self._staying: set[int] = set()  # known to be on the device, so that moving it would save nothing

    def totals(self) -> BlockBytes:
        return BlockBytes(self.kept_bytes, self.moved_bytes, self.d2h_bytes)

    def since(self, before: BlockBytes, sofar: BlockBytes) -> BlockBytes:
        """What was entered since ``before``, on top of ``sofar``."""
        now, fields = self.totals(), ("kept_bytes", "cpu_bytes", "copied_bytes")
        return BlockBytes(*(getattr(sofar, f) + getattr(now, f) - getattr(before, f) for f in fields))

    def enter(self, call: ModuleCall, moves: frozenset[str], around: _Place = _Place.STAYS) -> None:
        """A call and all inside it. around: what becomes of that which the call around it saves."""
        segment = self._segment_of.get(id(call))
        if segment is not None:
            self._enter_recomputed(call, segment, moves)
            return
        place = around
        if SAVED in moves or (call.kind == ATTENTION_SIDE and ATTENTION in moves):
            place = _Place.MOVES
        elif call.kind == BLOCK and moves:
            place = _Place.SHARED
        for step in call.steps:
            if isinstance(step, ModuleCall):
                self.enter(step, moves, place)
            elif self._goes_out(step, place):
                self._count(step, self.moved)
            else:
                self.saved.add(step)
                self._count(step, self.kept)

    def _enter_recomputed(self, call: ModuleCall, segment: _Segment, moves: frozenset[str]) -> None:
        if not segment.dropping:
            return
        self.dropped |= call.all_saved
        externals = [use.storage for use in call.arguments if use.tensor in segment.external]
        at_once = (call.stack, call.index) in self._at_the_end
        place = _Place.STAYS if at_once else self._place_of(bool(moves & {BOUNDARY, SAVED}))
        self._hold(externals, segment, place, counted=id(call) in segment.dropping)
        if segment.kernels:
            results = [storage for kernel in call.outermost(KERNEL) for storage in kernel.results]
            self._hold(results, segment, self._place_of(ATTENTION in moves))

    def _place_of(self, moves: bool) -> _Place:
        """Where a segment puts what it holds; with a schedule that moves nothing there is nobody to share with."""
        return _Place.MOVES if moves else _Place.SHARED if self._any_moves else _Place.STAYS

    def _hold(self, storages: Iterable[int], segment: _Segment, place: _Place, counted: bool = True) -> None:
        for storage in storages:
            out = self._goes_out(storage, place)
            if not out:
                segment.holds.add(storage)
            if counted:
                self._count(storage, self.moved if out else self.kept)

    def _goes_out(self, storage: int, place: _Place) -> bool:
        """Whether a storage that is saved waits in CPU memory, by now or before."""
        if place is not _Place.STAYS and storage in self._in_cpu_memory:
            return True
        if place is _Place.MOVES and self._may_move(storage):
            self._in_cpu_memory.add(storage)
            self.d2h_bytes += self._sizes[storage]
            return True
        if place is _Place.SHARED:
            self._staying.add(storage)
        return False

    def _may_move(self, storage: int) -> bool:
        return storage not in self._staying and self._sizes.get(storage, -1) >= self._min_bytes

    def _count(self, storage: int, book: set[int]) -> None:
        if storage in self.kept or storage in self.moved:
            return
        book.add(storage)
        if book is self.kept:
            self.kept_bytes += self._sizes.get(storage, 0)
        else:
            self.moved_bytes += self._sizes.get(storage, 0)


def _needed_at_once(schedule: Schedule) -> set[tuple[str, int]]:
    """The blocks of the last segment, where its like move their arguments: backward wants these at once, so they stay
    on the device, though they may have been copied for other blocks before."""
    name, stack = list(schedule.stacks.items())[-1]
    segment, treatment = stack.segments[-1], stack.treatments[-1]
    alike = (
        moves
        for other in schedule.stacks.values()
        for moves, word in zip(other.moves, other.treatments, strict=True)
        if word == treatment
    )
    if segment is None or stack.moves[-1] or not any(BOUNDARY in moves for moves in alike):
        return set()
    return {(name, index) for index in stack.blocks_of(segment)}


def _segments(trace: HeldTrace, schedule: Schedule) -> list[_Segment]:
    formed: list[_Segment] = []
    running: dict[str, _Segment] = {}
    for call in trace.calls:
        stack = schedule.stacks[call.stack]
        treatment = stack.treatments[call.index]
        if treatment in IN_SEGMENTS:
            _place(call, stack.segments[call.index], running, formed, kernels=treatment == SELECTIVE)
            _settle(call, bool(call.all_saved), running)
        elif treatment == FFN:
            _place_feed_forward(call, trace, formed)
    return formed


def _place_feed_forward(block: ModuleCall, trace: HeldTrace, formed: list[_Segment]) -> None:
    modules = list(block.outermost(FEED_FORWARD))
    last = {call.stack: call.index for call in modules}
    running: dict[str, _Segment] = {}
    for call in modules:
        segment = _place(call, None, running, formed)
        # Alone at the end of its chain, a module that saved weights only would hold its input for nothing.
        alone = len(segment.calls) == 1 and call.index == last[call.stack]
        _settle(call, any(storage in trace.sizes_bytes or not alone for storage in call.all_saved), running)


def _place(
    call: ModuleCall, planned: int | None, running: dict[str, _Segment], formed: list[_Segment], kernels: bool = False
) -> _Segment:
    """Add a call to the open segment of its stack, or to a new one."""
    segment = running.get(call.stack)
    if segment is None or not segment.takes(planned, call):
        segment = running[call.stack] = _Segment(planned, call.index, kernels)
        formed.append(segment)
    segment.add(call)
    return segment


def _settle(call: ModuleCall, drops: bool, running: dict[str, _Segment]) -> None:
    """A call that drops nothing ends its segment."""
    if drops:
        running[call.stack].dropping.add(id(call))
    else:
        del running[call.stack]
