"""Counts what really happened in a step: calls, recomputations, segments, and the bytes behind saved tensors.

Calls are counted always. Bytes are counted in a step's forward when the first block's input shapes are new to the
handle, and stand for the steps that follow with the same shapes: counting storages costs host time.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.plan.schedule import IN_SEGMENTS, KEPT
from lowtide.runtime.flatten import flatten_call
from lowtide.runtime.placeholder import Packed, Passed, Weight, unpack
from lowtide.runtime.segment import Call, Segment
from lowtide.runtime.store import Store

_MOST_FORWARDS = 16
_EMPTY: dict[int, Any] = {}


@dataclass
class BlockRecord:
    """One block's line in the receipt."""

    name: str
    stack: str
    index: int
    planned: str
    ledger: "weakref.ref[Ledger]"
    number: int
    planned_reason: str | None = None
    treatment: str = KEPT
    segment: int | None = None
    reason: str | None = None
    forward_calls: int = 0
    recompute_calls: int = 0
    in_compiled_code: bool = False
    dropped: bool = False

    def count_replay(self) -> None:
        self.recompute_calls += 1
        self.note_replay()

    def note_replay(self) -> None:
        ledger = self.ledger()
        if ledger is not None:
            ledger.note_backward()

    def has_hooks_around(self) -> bool:
        """Whether the block, or a module that it is part of, has forward hooks: of FSDP, which moves weights, say."""
        ledger = self.ledger()
        module = ledger.model() if ledger is not None else None
        for part in self.name.split("."):
            if module is None or _has_hooks(module):
                break
            module = module._modules.get(part)
        return module is not None and _has_hooks(module)

    def reset(self) -> None:
        self.treatment, self.segment, self.reason = self.planned, None, self.planned_reason
        self.forward_calls = self.recompute_calls = 0
        self.in_compiled_code = self.dropped = False


class Storages:
    """Bytes of distinct storages, each credited to the block that held, moved or dropped it first.

    kernels_kept: whether the outputs of any attention kernel are among what is held or moved.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.kernels_kept = False
        self.weights = (
            set()
            if model is None
            else {_key(t) for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided}
        )
        self.held: dict[int, tuple[int, int]] = {}
        self.moved: dict[int, tuple[int, int]] = {}
        self.dropped: dict[int, tuple[int, int]] = {}
        self._pins: list[StorageWeakRef] = []  # a dead storage's key must not be given to another one

    def hold(self, block: int, tensor: torch.Tensor) -> None:
        self._enter(self.held, block, tensor, self.moved)

    def move(self, block: int, tensor: torch.Tensor) -> None:
        """It waits in CPU memory."""
        self._enter(self.moved, block, tensor, self.held)

    def drop(self, block: int, tensor: torch.Tensor) -> None:
        self._enter(self.dropped, block, tensor)

    def _enter(
        self, book: dict[int, tuple[int, int]], block: int, tensor: torch.Tensor, other: dict[int, Any] = _EMPTY
    ) -> None:
        if tensor.layout is not torch.strided:
            return
        key = _key(tensor)
        if key in book or key in other or key in self.weights:
            return
        storage = tensor.untyped_storage()
        book[key] = (block, storage.nbytes())
        self._pins.append(StorageWeakRef(storage))

    def held_bytes(self, block: int) -> int:
        return sum(size for owner, size in self.held.values() if owner == block)

    def moved_bytes(self, block: int) -> int:
        return sum(size for owner, size in self.moved.values() if owner == block)

    def dropped_bytes(self, block: int) -> int:
        there = self.held.keys() | self.moved.keys()
        return sum(size for key, (owner, size) in self.dropped.items() if owner == block and key not in there)

    def release_pins(self) -> None:
        """The forward is over: its keys are settled."""
        self._pins.clear()


class Ledger:
    """The books of one handle. A window is one forward (or several before a backward) and what recomputed it."""

    def __init__(self, model: nn.Module, store: Store | None = None) -> None:
        self.model = weakref.ref(model)
        self.store = store
        if store is not None:
            note = weakref.WeakMethod(self.note_backward)  # the store must not keep the books, and the model, alive
            store.on_first_read = lambda: told() if (told := note()) is not None else None
        self.records: list[BlockRecord] = []
        self.fallbacks: dict[str, str] = {}
        self.backward_seen = False
        self.storages: Storages | None = None
        self.measuring = False
        self._measured: tuple[Any, ...] | None = None
        self._first: BlockRecord | None = None
        self._backward = -1  # autograd's number of the backward that this window belongs to, once it is known
        self._segments = 0
        self._taking_in = False

    def add(self, name: str, stack: str, index: int, planned: str, reason: str | None = None) -> BlockRecord:
        number = len(self.records)
        record = BlockRecord(name, stack, index, planned, weakref.ref(self), number, reason, treatment=planned)
        self.records.append(record)
        return record

    # ------------------------------------------------------------------ windows

    def begin_call(self, record: BlockRecord, leaves: Sequence[torch.Tensor]) -> None:
        if self._opens_window(record):
            self._open_window(record, leaves)
        record.forward_calls += 1
        if record is self._first and record.forward_calls > _MOST_FORWARDS:
            self._stop_measuring()  # forwards without a backward go on and on: the books must not grow with them
        self._taking_in = True

    def _stop_measuring(self) -> None:
        if self.measuring and self.storages is not None:
            self.storages.release_pins()
        self.measuring = False

    def begin_kept_call(self, record: BlockRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As begin_call, without flattening the arguments where no window opens."""
        opens = self._opens_window(record)
        self.begin_call(record, flatten_call(args, kwargs, opaque=True)[1] if opens else ())
        self._taking_in = False

    def _opens_window(self, record: BlockRecord) -> bool:
        """Whether this call begins a step. One inside the backward that has been seen is somebody's recomputation."""
        if self.backward_seen:
            task = _current_graph_task_id()
            return task == -1 or task != self._backward
        return self._first is None or (record is self._first and self._nothing_is_replayed())

    def note_backward(self) -> None:
        if not self.backward_seen:
            self.backward_seen = True
            if self._backward == -1:
                self._backward = _current_graph_task_id()

    def _nothing_is_replayed(self) -> bool:
        moved = self.store is not None and self.store.counts.d2h_bytes
        return not moved and all(other.planned == KEPT for other in self.records)

    def _open_window(self, record: BlockRecord, leaves: Sequence[torch.Tensor]) -> None:
        for other in self.records:
            other.reset()
        self.fallbacks.clear()
        self.backward_seen, self._segments, self._first = False, 0, record
        self._backward = _current_graph_task_id()
        if self.measuring and self.storages is not None:
            self.storages.release_pins()
        shapes = (record.name, *(tensor.shape for tensor in leaves))
        measured_before = self.measuring
        self.measuring = shapes != self._measured
        if self.store is not None:  # the first step of a shape allocates buffers: the second one's times stand
            self.store.begin_step(timed=self.measuring or measured_before)
        if self.measuring:
            self._measured = shapes
            self.storages = Storages(self.model())

    # ------------------------------------------------------------------ what happened

    def end_call(self, record: BlockRecord, segment: Segment, call: Call) -> None:
        record.dropped |= call.drops
        record.reason = record.planned_reason if record.dropped else "nothing in it needed a gradient"
        if call.drops and record.planned in IN_SEGMENTS:
            if segment.label is None:
                segment.label, self._segments = self._segments, self._segments + 1
            record.segment = segment.label
        if self.measuring and self.storages is not None:
            number = record.number
            for external in segment.externals[segment.counted :]:
                tensor = external.alive()  # packed by hooks outside, it is no longer in the external itself
                if tensor is not None and call.drops:
                    (self.storages.move if external.moved else self.storages.hold)(number, tensor)
            segment.counted = len(segment.externals)
        self._taking_in = False

    def fall_back(self, record: BlockRecord, reason: str) -> None:
        self.fallbacks[record.name] = reason

    def keep_instead(self, record: BlockRecord, reason: str) -> None:
        record.treatment, record.reason = KEPT, reason
        self.fallbacks[record.name] = reason

    # ------------------------------------------------------------------ counting bytes

    def packer(self, record: BlockRecord) -> Callable[[torch.Tensor], None] | None:
        """Called with every tensor that a treated call drops; None while bytes are not counted."""
        storages = self.storages
        if not self.measuring or storages is None:
            return None
        number = record.number
        return lambda tensor: storages.drop(number, tensor)

    def keeper(self, record: BlockRecord) -> Callable[[torch.Tensor, bool], None] | None:
        """Called with every tensor that a selective call keeps, and whether it moved; None while nothing is counted."""
        storages = self.storages
        if not self.measuring or storages is None:
            return None
        number = record.number

        def keep(tensor: torch.Tensor, moved: bool) -> None:
            storages.kernels_kept = True
            (storages.move if moved else storages.hold)(number, tensor)

        return keep

    def moving_hooks(self, record: BlockRecord, pack: Callable[[torch.Tensor], Packed]) -> AbstractContextManager[Any]:
        """Saved-tensor hooks that let the store take what a call saves, and count it while bytes are counted."""
        storages = self.storages
        if not self.measuring or storages is None:
            return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        number = record.number

        def counted(tensor: torch.Tensor) -> Packed:
            packed = pack(tensor)
            if not self._taking_in:  # a segment's boundary: counted in end_call, if the segment drops anything
                (storages.move if packed.moved else storages.hold)(number, tensor)
            return packed

        return torch.autograd.graph.saved_tensors_hooks(counted, unpack)

    def keeping_hooks(self, record: BlockRecord) -> AbstractContextManager[Any] | None:
        """Saved-tensor hooks that count what a kept call saves; None while bytes are not counted."""
        if not self.measuring:
            return None
        outside = _top_saved_tensors_default_hooks(False)

        def keep(tensor: torch.Tensor) -> Packed:
            return Passed(tensor, outside) if outside is not None else Weight(tensor, record.name)

        return self.moving_hooks(record, keep)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
