"""One storage that waits in CPU memory, and what stands in the graph for the tensors that saved it. See store.py."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.link import Lane
from lowtide.runtime.placeholder import Weight, version_of
from lowtide.runtime.pool import Buffer

if TYPE_CHECKING:
    from lowtide.runtime.store import Store


class Copied:
    """One batch of copies of a lane. Gives its event back when nobody means it any more.

    number: of the batch; who waited for a later one of the same lane need not wait for this one.
    """

    __slots__ = ("event", "lane", "number")

    def __init__(self, lane: Lane | None, event: Any, number: int) -> None:
        self.lane = lane
        self.event = event
        self.number = number

    def __del__(self) -> None:
        if self.lane is not None:
            self.lane.give_back(self.event)


class Entry:
    """One storage that waits in CPU memory; owned by the tickets of its saved views."""

    __slots__ = (
        "__weakref__",
        "alias",
        "buffer",
        "copied",
        "device",
        "index",
        "key",
        "link",
        "name",
        "number",
        "returned",
        "size",
        "source",
        "spoiled",
        "store",
        "stream",
        "target",
        "tickets",
        "unread",
        "version",
        "views",
    )

    def __init__(self, store: "Store", tensor: torch.Tensor, storage: torch.UntypedStorage, size: int) -> None:
        self.store = store
        self.copied: Copied | None = None
        self.buffer: Buffer | None = None
        self.source: torch.Tensor | None = tensor.detach()
        self.version = version_of(tensor)
        self.alias = StorageWeakRef(storage)
        self.key = storage._cdata
        self.size = size
        self.device = tensor.device
        self.returned: Copied | None = None
        self.target: torch.Tensor | None = None
        self.stream: torch.Stream | None = None  # whose memory the target is
        self.views: list[weakref.ref[torch.Tensor]] = []
        self.tickets = self.unread = 0
        self.index = self.number = -1
        self.spoiled = False
        self.name = store.block_name

    def is_of(self, tensor: torch.Tensor) -> bool:
        return not self.alias.expired() and self.version == version_of(tensor)

    def wait_for_return(self) -> None:
        """Whoever reads what was brought back, reads it after its copy."""
        if self.returned is not None:
            self.link.target_is_ready(self.returned.event)

    def drop_source(self) -> None:
        """Rule 3: after the computation has waited for the copy. What it does next may use the memory."""
        source, self.source = self.source, None
        if source is not None:
            self.spoiled |= version_of(source) != self.version
            self.store.in_flight_bytes -= self.size

    def __del__(self) -> None:
        store = self.store
        if self.copied is None:
            if self.buffer is not None:  # memory ran out before its copy began
                store.pool.give(self.buffer)
            return
        with store.lock:
            if self.source is not None:
                self.link.source_may_go(self.copied.event)
                self.drop_source()
            if self.target is not None and self.unread == self.tickets:
                store.ahead_bytes -= self.size
                if self.returned is not None:
                    self.link.target_may_go(self.returned.event, self.stream)
            if self.buffer is not None:
                self.buffer.busy = (self.returned or self.copied).event
                store.pool.give(self.buffer)


class Ticket:
    """Stands in the graph for one saved tensor, a view of an entry's storage."""

    __slots__ = ("dtype", "entry", "offset", "shape", "stride")
    moved = True

    def __init__(self, entry: Entry, tensor: torch.Tensor) -> None:
        self.entry = entry
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        entry.tickets += 1
        entry.unread += 1

    def take(self) -> torch.Tensor:
        return self.entry.store.get(self)


class Waking(Weight):
    """Stands for a saved tensor that stays on the device; reading it wakes the store."""

    __slots__ = ("packed", "store")

    def __init__(self, tensor: torch.Tensor, store: "Store") -> None:
        super().__init__(tensor, store.block_name)
        self.store = store
        self.packed = store.packs

    def take(self) -> torch.Tensor:
        self.store.wake(self.packed)
        return super().take()
