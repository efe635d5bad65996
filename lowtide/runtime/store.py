"""Saved tensors that wait in CPU memory between forward and backward. Recomputation and offload both use it.

What is stored are storages: each goes out once while its source lives, however many views of it are saved. Backward
reads in the reverse order of forward, so what comes next is known: it is brought back ahead, up to a number of bytes.

Rules, each the lesson of a project that got it wrong (docs/offload.md):
 1. A key is valid while its storage lives, which a weak reference watches: addresses are used again.
 2. A weight stays, also as a view of one; so does a small tensor, a subclass, whatever has no plain storage.
 3. A source is held until the computation waits for its copy, and at most ``in_flight_bytes`` of them are.
 4. A source that is still there when backward asks is used as it is: the last block never makes the round trip.
 5. A buffer belongs to its entry, the entry to the graph: reading twice works, and a dropped graph gives all back.
 6. What was brought back is handed on once every reader had it, and waited for if nobody reads it.
 7. A source that changes in place before it was copied is an error, as it is in a plain run.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import ReplayError
from lowtide.plan.schedule import MAX_SIZES, MIN_BYTES
from lowtide.runtime.entry import Copied, Entry, Ticket, Waking
from lowtide.runtime.link import Lane, Link, Times, accelerator_or_simulated, link_to
from lowtide.runtime.placeholder import Weight, version_of
from lowtide.runtime.pool import Pool, pool_for
from lowtide.runtime.receipt import Copies
from lowtide.runtime.weights import WeightKeys, is_activation

_AHEAD_BYTES = 256 * 2**20  # where no block tells how much is read at a time
_BATCH_BYTES = 64 * 2**20  # copies are started together until they are worth a start of their own
_TIDY = 1024  # entries
_NO_BLOCK = "a region"
_NO_BACKWARD = -2  # outside of one, torch says -1
_STRIDED = torch.strided


alive: "weakref.WeakSet[Store]" = weakref.WeakSet()
"""Every store of the process, for those who count its memory."""


@dataclass
class Counts:
    """What one step moved. d2h: device to CPU memory; h2d: back. misses: reads that had to wait for their copy."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    prefetch_misses: int = 0


class Store:
    """Saved tensors of one model, or of any region.

    min_bytes: smaller storages stay. max_sizes: distinct sizes of pinned buffers; 0: ordinary CPU memory.
    in_flight_bytes, prefetch_bytes: see plan.schedule.Schedule; None: as much as the largest block moves.
    pool: somebody else's, of which ``max_sizes`` is part; None: one of its own.
    Thread-safe. Raises ConfigError where there is no accelerator to offload from.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        max_sizes: int = MAX_SIZES,
        in_flight_bytes: int | None = None,
        prefetch_bytes: int | None = None,
        pool: Pool | None = None,
    ) -> None:
        device = accelerator_or_simulated()
        self.simulated = device.type == "cpu"
        self.min_bytes = max(1, min_bytes)
        self.pool = pool_for(device, max_sizes) if pool is None else pool
        self._own_pool = pool is None
        self.model = weakref.ref(model) if model is not None else None
        self.counts = Counts()
        self.times: Times | None = None
        self.block_name = _NO_BLOCK
        self.on_first_read: Callable[[], None] | None = None
        self.read = False  # whether backward has begun
        self._backward = _NO_BACKWARD  # the one that read, or woke, last
        self.packs = 0  # so far, over all forwards
        self.in_flight_bytes = 0  # of sources that still wait for their copy
        self.ahead_bytes = 0  # brought back and not yet read
        self._most_in_flight, self._most_ahead = in_flight_bytes, prefetch_bytes
        self._block: Hashable = None
        self._block_bytes = self._largest_block_bytes = 0
        self._weights: set[int] = set()
        self._keys = WeightKeys(model) if model is not None else None
        self._links: dict[torch.device, Link] = {}
        self._entries: dict[int, weakref.ref[Entry]] = {}  # by key of the storage
        self._staying: dict[int, StorageWeakRef] = {}
        self._order: list[weakref.ref[Entry]] = []
        self._next = -1  # entries from here on up have been brought back, or need not be
        self._pending: list[weakref.ref[Entry]] = []  # what nobody wants any more before it is copied is forgotten
        self._pending_bytes = 0
        self._batches = 0
        self._tidy_at = _TIDY
        self._queue: deque[weakref.ref[Entry]] = deque()  # sources that wait for their copy, oldest first
        self.lock = threading.RLock()
        alive.add(self)

    # ------------------------------------------------------------------ steps and blocks

    def begin_step(self, timed: bool) -> None:
        """A new step: count from zero, look at the weights again. timed: measure copies and waits in it."""
        self.counts = Counts()
        self.read = False
        self._block_bytes = 0  # the block may be the same one as at the end of the last step
        self.times = Times() if timed else self.times
        for link in self._links.values():
            link.times = self.times if timed else None
        self.look_at_weights()
        with self.lock:
            self._staying = {}

    def look_at_weights(self) -> None:
        """Rule 2. Weights may have been exchanged since."""
        self._weights = set() if self._keys is None else self._keys.now()

    def enter_block(self, number: Hashable, name: str) -> None:
        """What is packed from now on belongs to this block: the largest one's bytes bound what is in flight.

        number: of the block, or of what is brought back together with it.
        """
        self.block_name = name
        if number != self._block:
            self._block, self._block_bytes = number, 0

    def leave_block(self) -> None:
        """What is packed from now on belongs to no block."""
        self._block, self.block_name = None, _NO_BLOCK

    # ------------------------------------------------------------------ saved-tensor hooks

    def pack(self, tensor: torch.Tensor) -> Ticket | Weight:
        """Saved-tensor hook: let the tensor's storage wait in CPU memory, if it may."""
        return self.move(tensor) or Weight(tensor, self.block_name)

    def share(self, tensor: torch.Tensor) -> Ticket | Weight:
        """Saved-tensor hook around what stays: a storage that waits in CPU memory already is not held here too."""
        return self.hold(tensor) or Weight(tensor, self.block_name)

    def move(self, tensor: torch.Tensor, postponed: bool = False) -> Ticket | None:
        """A ticket for the tensor, whose storage then waits in CPU memory; None if it has to stay.

        postponed: its copy begins at the next ``flush``, if somebody still has the ticket then.
        """
        entry = self._entry_for(tensor, admit=True, postponed=postponed)
        return None if entry is None else Ticket(entry, tensor)

    def move_later(self, tensor: torch.Tensor) -> Ticket | None:
        """``move``, postponed: it is not clear yet whether the tensor is held at all."""
        return self.move(tensor, postponed=True)

    def hold(self, tensor: torch.Tensor) -> Ticket | None:
        """A ticket where the storage waits in CPU memory already; None: whoever asks holds it on the device."""
        entry = self._entry_for(tensor, admit=False)
        if entry is not None:
            return Ticket(entry, tensor)
        self.stays(tensor)
        return None

    def pack_here(self, tensor: torch.Tensor) -> "Waking":
        """Saved-tensor hook of what runs last: it stays, and reading it tells that the rest is wanted soon."""
        return Waking(tensor, self)

    def wake(self, packed: int) -> None:
        """Backward is at what was saved when there had been so many ``packs``: bring back what was packed by then, from
        the last of it on that somebody still wants. Once in a backward, and not in one that has begun to read."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        with self.lock:
            for place in reversed(range(len(self._order))):
                entry = self._order[place]()
                if entry is not None and entry.index == place and entry.number <= packed:
                    self._next = place + 1
                    self._prefetch()
                    return

    def results_after_arguments(self, began: int, recorded: int) -> None:
        """Backward runs this part of the forward again: it reads the arguments, the last first, and then what was kept
        of attention kernels, the first first. They are to come back in that order.

        began, recorded: ``packs`` before the arguments were packed, and when they had been.
        """
        with self.lock:
            places, arguments, results = [], [], []
            for place in reversed(range(len(self._order))):
                entry = self._order[place]()
                if entry is None or entry.index != place:
                    continue
                if entry.number <= began:
                    break
                places.append(place)
                (results if entry.number > recorded else arguments).append(entry)
            for place, entry in zip(places, [*arguments, *reversed(results)], strict=True):
                entry.index, self._order[place] = place, weakref.ref(entry)

    def stays(self, tensor: torch.Tensor) -> None:
        """Somebody holds this storage on the device anyway: moving it would save nothing."""
        if type(tensor) is torch.Tensor and tensor.layout is _STRIDED:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.min_bytes:
                with self.lock:
                    self._staying[storage._cdata] = StorageWeakRef(storage)

    # ------------------------------------------------------------------ out

    def _entry_for(self, tensor: torch.Tensor, admit: bool, postponed: bool = False) -> Entry | None:
        if type(tensor) is not torch.Tensor or tensor.layout is not _STRIDED or not self._is_here(tensor.device):
            return None
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < self.min_bytes or tensor.is_conj() or tensor.is_neg():  # a ticket knows no such bit
            return None
        key = storage._cdata
        with self.lock:
            known = self._entries.get(key)
            entry = known() if known is not None else None
            if entry is not None and entry.is_of(tensor):
                if entry.index != len(self._order) - 1:
                    self._put_last(entry)
                return entry
            if not admit or key in self._weights or self._holds(key) or not is_activation(tensor):
                return None
            return self._admit(Entry(self, tensor, storage, size), postponed)

    def _is_here(self, device: torch.device) -> bool:
        kind = device.type
        return kind != "meta" and (kind == "cpu") == self.simulated

    def _holds(self, key: int) -> bool:
        staying = self._staying.get(key)
        return staying is not None and not staying.expired()

    def _admit(self, entry: Entry, postponed: bool) -> Entry:
        link = self._links.get(entry.device)
        if link is None:
            link = self._links[entry.device] = link_to(entry.device)
            link.times = self.times
        entry.link = link
        self._entries[entry.key] = weakref.ref(entry)
        self._put_last(entry)
        self._pending.append(weakref.ref(entry))
        self._pending_bytes += entry.size
        if self._pending_bytes >= _BATCH_BYTES and not postponed:
            self.flush()
        return entry

    def _put_last(self, entry: Entry) -> None:
        """Backward reads it at its last use in forward."""
        self.packs += 1
        entry.index, entry.number = len(self._order), self.packs
        self._order.append(weakref.ref(entry))
        self._next = -1

    def flush(self) -> None:
        """Start the copies of what was packed."""
        if not self._pending:
            return
        with self.lock:
            pending = [entry for reference in self._pending if (entry := reference()) is not None]
            self._pending, self._pending_bytes = [], 0
            for link in {id(entry.link): entry.link for entry in pending}.values():
                self._copy_out(link, [entry for entry in pending if entry.link is link])
            self._bound_in_flight()
            self._forget_the_dead()

    def _copy_out(self, link: Link, entries: list[Entry]) -> None:
        link.source_is_ready()
        copies = []
        for entry in entries:
            assert entry.source is not None
            buffer = entry.buffer = self.pool.take(entry.size)
            if buffer.busy is not None:
                link.buffer_is_free(buffer.busy)
            copies.append((_bytes_of(entry.source), buffer.tensor[: entry.size]))
        copied = self._batch(link.out, link.copy_out(copies))
        for entry in entries:
            entry.copied = copied
            self._queue.append(weakref.ref(entry))
        moved_bytes = sum(entry.size for entry in entries)
        self.counts.d2h_bytes += moved_bytes
        self.in_flight_bytes += moved_bytes
        if self._block is not None:
            self._block_bytes += moved_bytes
            self._largest_block_bytes = max(self._largest_block_bytes, self._block_bytes)
        if copied.event is None:  # the host has copied already
            self.settle()

    def _batch(self, lane: Lane | None, event: Any) -> Copied:
        self._batches += 1
        return Copied(lane, event, self._batches)

    def _bound_in_flight(self) -> None:
        most = self._most_in_flight
        if most is None:
            most = self._largest_block_bytes or _AHEAD_BYTES
        self._let_go_down_to(most)

    def settle(self) -> None:
        """Let every source go: the forward is at its end, and memory is scarcest where backward begins."""
        with self.lock:
            self._let_go_down_to(0)

    def _let_go_down_to(self, most_bytes: int) -> None:
        """Rule 3. Copies out end in the order in which they began, so one wait is enough."""
        leaving = []
        left_bytes = self.in_flight_bytes
        while self._queue and left_bytes > most_bytes:
            entry = self._queue.popleft()()
            if entry is not None and entry.source is not None:
                leaving.append(entry)
                left_bytes -= entry.size
        for link in {id(entry.link): entry.link for entry in leaving}.values():
            newest = next(entry for entry in reversed(leaving) if entry.link is link)
            assert newest.copied is not None
            link.source_may_go(newest.copied.event)
        for entry in leaving:
            entry.drop_source()

    def _forget_the_dead(self) -> None:
        """The books grow with the entries that live, not with the steps."""
        if len(self._order) < self._tidy_at:
            return
        known = [(index, reference()) for index, reference in enumerate(self._order)]
        alive = [entry for index, entry in known if entry is not None and entry.index == index]
        for index, entry in enumerate(alive):
            entry.index = index
        self._order = [weakref.ref(entry) for entry in alive]
        self._entries = {entry.key: weakref.ref(entry) for entry in alive}
        self._queue = deque(reference for reference in self._queue if reference() is not None)
        self._staying = {key: storage for key, storage in self._staying.items() if not storage.expired()}
        self._next = -1
        self._tidy_at = max(_TIDY, 2 * len(alive))

    # ------------------------------------------------------------------ back

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The tensor that a ticket stands for, on its device and as the current stream may read it."""
        entry = ticket.entry
        self._backward = torch._C._current_graph_task_id()
        if not self.read:
            self.read = True
            if self.on_first_read is not None:
                self.on_first_read()
        with self.lock:
            storage = self._storage_of(entry)
            value = torch.empty(0, dtype=ticket.dtype, device=entry.device)
            value.set_(storage, ticket.offset, ticket.shape, ticket.stride)  # type: ignore[call-overload]
            if entry.source is None:
                entry.link.target_is_read(value, entry.stream)
                self._hand_on(entry, value)
            self._prefetch()
        return value

    def _storage_of(self, entry: Entry) -> torch.UntypedStorage:
        if entry.source is not None:  # rule 4
            self._check(entry, version_of(entry.source) != entry.version)
            self._next = entry.index
            return entry.source.untyped_storage()
        self._check(entry, entry.spoiled)
        for view in entry.views:
            if (alive := view()) is not None:
                entry.wait_for_return()
                return alive.untyped_storage()
        if entry.target is None:
            self.counts.prefetch_misses += 1
            self._next = entry.index
            self._bring_back([entry])
        elif self._next < 0:
            self._next = entry.index
        assert entry.target is not None
        if entry.unread == entry.tickets:
            self.ahead_bytes -= entry.size
        entry.wait_for_return()
        return entry.target.untyped_storage()

    @staticmethod
    def _check(entry: Entry, changed: bool) -> None:
        if changed:  # rule 7
            raise ReplayError(
                f"a tensor that {entry.name} saved has been modified by an inplace operation before its backward."
            )

    def _hand_on(self, entry: Entry, value: torch.Tensor) -> None:
        """Rule 6: when every saved view has been read, the readers hold the memory, not the entry."""
        entry.views = [view for view in entry.views if view() is not None]
        entry.views.append(weakref.ref(value))
        entry.unread -= 1
        if entry.unread <= 0 or entry.target is None:
            entry.target = None
            entry.unread = entry.tickets

    def _prefetch(self) -> None:
        """Bring back what was packed before, as far as the bound allows."""
        most = self._most_ahead
        if most is None:
            most = self._largest_block_bytes or _AHEAD_BYTES
        wanted: list[Entry] = []
        ahead_bytes = self.ahead_bytes
        while self._next > 0:
            entry = self._order[self._next - 1]()
            if entry is not None and self._waits_at(entry, self._next - 1):
                if ahead_bytes and ahead_bytes + entry.size > most:
                    break
                ahead_bytes += entry.size
                wanted.append(entry)
            self._next -= 1
        self._bring_back(wanted)

    @staticmethod
    def _waits_at(entry: Entry, index: int) -> bool:
        """Whether it is to be brought back at this place of the order: not if it was used again later, or is in use."""
        gone = entry.source is None and entry.target is None
        return gone and entry.index == index and all(view() is None for view in entry.views)

    def _bring_back(self, entries: list[Entry]) -> None:
        for batch in _batches_of(entries):
            link = batch[0].link
            targets = [torch.empty(entry.size, dtype=torch.uint8, device=entry.device) for entry in batch]
            stream = link.target_is_free()
            self._wait_until_full(link, batch)
            buffers = [entry.buffer.tensor[: entry.size] for entry in batch if entry.buffer is not None]
            copies = list(zip(buffers, targets, strict=True))
            returned = self._batch(link.back, link.copy_in(copies))
            for entry, target in zip(batch, targets, strict=True):
                entry.returned, entry.stream = returned, stream
                entry.target = target  # not before its copy has begun: memory may have run out on the way here
                entry.unread = entry.tickets
                self.ahead_bytes += entry.size
                self.counts.h2d_bytes += entry.size

    def _wait_until_full(self, link: Link, entries: list[Entry]) -> None:
        """Copies out end in the order in which they began, so one wait is enough, and often none."""
        newest = max((entry.copied for entry in entries if entry.copied is not None), key=lambda copied: copied.number)
        if newest.number > link.full_through:
            link.buffer_is_full(newest.event)
            link.full_through = newest.number

    # ------------------------------------------------------------------ what it holds, and the end

    @property
    def passing_bytes(self) -> int:
        """What is on the device on its way: sources that are not yet copied, and what was brought back ahead."""
        return self.in_flight_bytes + self._pending_bytes + self.ahead_bytes

    def copies(self) -> Copies:
        """What the last step moved. Waits for its copies where they were timed."""
        hidden_ms, exposed_ms = self.times.totals() if self.times is not None else (0.0, 0.0)
        return Copies(
            **vars(self.counts), hidden_copy_ms=hidden_ms, exposed_copy_ms=exposed_ms, pool=self.pool.statistics()
        )

    def close(self) -> None:
        """Free the buffers of a pool of its own; those of graphs that are still alive when these end."""
        self.flush()
        if self._own_pool:
            self.pool.close()


def _batches_of(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Neighbours on one link that are brought back together, in one batch of copies."""
    batch: list[Entry] = []
    batch_bytes = 0
    for entry in entries:
        if batch and (entry.link is not batch[0].link or batch_bytes + entry.size > _BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(entry)
        batch_bytes += entry.size
    if batch:
        yield batch


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A storage as flat bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())  # type: ignore[call-overload]
