"""CPU buffers that wait to be used again: pinned where the machine allows, since only such copies run by themselves.

Pinning is slow (half a second a GiB) and torch's own pinned allocator rounds to powers of two, so buffers are mapped
at their size, registered once, and kept.
"""

import logging
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lowtide.runtime.host_memory import SHARE_OF_MACHINE, HostMemory, host_memory
from lowtide.units import format_bytes

_log = logging.getLogger("lowtide")
_PAGE = mmap.PAGESIZE
_SHARE_OF_FREE = 0.9
_NEAR = 0.9  # of what may be pinned: from there on it is told
_SLACK = 1.25  # how much more than the largest step the pool may hold before it gives buffers of unused sizes back
_LOOSEST = 2  # a buffer at most this many times too large is taken rather than a new one allocated


class Buffer:
    """Bytes in CPU memory. busy: the last copy that reads or writes them, to be waited for before they are freed."""

    __slots__ = ("__weakref__", "asked", "busy", "pinned", "pooled", "size", "tensor")

    def __init__(self, tensor: torch.Tensor, size: int, pinned: bool, pooled: bool) -> None:
        self.tensor = tensor
        self.size = size
        self.asked = 0
        self.pinned = pinned
        self.pooled = pooled
        self.busy: Any = None

    def __del__(self) -> None:
        if self.busy is not None:
            with suppress(torch.AcceleratorError):  # a device that has failed reads and writes no more
                self.busy.synchronize()


def size_class(size: int) -> int:
    """The buffer size for ``size`` bytes: at most 1/32 more, so that texts of like length share one."""
    granule = max(_PAGE, 1 << max(0, (size - 1).bit_length() - 6))
    return -(-size // granule) * granule


class Pool:
    """Buffers by size. Thread-safe.

    max_sizes: how many distinct sizes are kept; 0: nothing is pinned, buffers are ordinary CPU memory.
    pin: makes a pinned buffer of a size, or returns None where the machine refuses; None: never pinned.
    memory: tells the machine's memory, to stay under a share of it.
    """

    def __init__(
        self,
        max_sizes: int,
        pin: Callable[[int], torch.Tensor | None] | None,
        memory: Callable[[], HostMemory | None] = host_memory,
    ) -> None:
        self.max_sizes = max_sizes
        self.pin = pin if max_sizes else None
        self._memory = memory
        self._lock = threading.RLock()
        self._free: dict[int, list[Buffer]] = {}  # by size; least recently used size first
        self._count: dict[int, int] = {}  # buffers of each size, free ones and others
        self._closed = False
        self._warned = self._warned_before = False
        self.total_bytes = 0
        self.pinned_bytes = 0
        self.in_use_bytes = 0
        self._asked_bytes = self._most_asked_bytes = 0  # without what is too large in the buffers
        self.buffers = 0
        self.fallbacks = 0

    def take(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes."""
        wanted = size_class(size)
        with self._lock:
            buffer = self._reuse(wanted) or self._allocate(wanted)
            buffer.asked = wanted
            self.in_use_bytes += buffer.size
            self._asked_bytes += wanted
            self._most_asked_bytes = max(self._most_asked_bytes, self._asked_bytes)
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._lock:
            self.in_use_bytes -= buffer.size
            self._asked_bytes -= buffer.asked
            if self._closed or not buffer.pooled:
                self._drop(buffer)
            else:
                self._free.setdefault(buffer.size, []).append(buffer)

    def close(self) -> None:
        """Free every buffer now, or as soon as it comes back."""
        with self._lock:
            self._closed = True
            self.trim()

    def trim(self) -> None:
        """Free the buffers that nobody uses now."""
        with self._lock:
            for size in list(self._free):
                self._drop_free(size)
            self._most_asked_bytes = self._asked_bytes

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "pinned_bytes": self.pinned_bytes,
                "pageable_bytes": self.total_bytes - self.pinned_bytes,
                "in_use_bytes": self.in_use_bytes,
                "buffers": self.buffers,
                "sizes": len(self._count),
                "fallbacks": self.fallbacks,
            }

    def _reuse(self, wanted: int) -> Buffer | None:
        free = self._free
        if wanted not in free:
            larger = [size for size in free if wanted < size <= _LOOSEST * wanted]
            if not larger:
                return None
            wanted = min(larger)
        buffers = free.pop(wanted)
        buffer = buffers.pop()
        if buffers:
            free[wanted] = buffers  # now the most recently used size
        return buffer

    def _allocate(self, size: int) -> Buffer:
        self._make_room(size)
        pooled = self.pin is None or size in self._count or len(self._count) < self.max_sizes
        tensor = self._pinned(size) if pooled else self._fall_back(f"it may keep {self.max_sizes} distinct sizes")
        pinned = tensor is not None
        if tensor is None:
            tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        buffer = Buffer(tensor, size, pinned, pooled)
        self.buffers += 1
        self.total_bytes += size
        self.pinned_bytes += size if pinned else 0
        if pooled:
            self._count[size] = self._count.get(size, 0) + 1
        return buffer

    def _pinned(self, size: int) -> torch.Tensor | None:
        if self.pin is None:
            return None
        memory = self._memory()
        if memory is not None:
            allowed = int(SHARE_OF_MACHINE * memory.limit_bytes) // _processes_here()
            if self.pinned_bytes + size > allowed or size > _SHARE_OF_FREE * memory.available_bytes:
                return self._fall_back(
                    f"{format_bytes(self.pinned_bytes)} are pinned; {format_bytes(allowed)} is the most it takes of "
                    f"this machine's {format_bytes(memory.limit_bytes)} (control group included), of which "
                    f"{format_bytes(memory.available_bytes)} are free"
                )
            if self.pinned_bytes + size > _NEAR * allowed:
                self._warn_before(allowed, memory.limit_bytes)
        tensor = self.pin(size)
        return tensor if tensor is not None else self._fall_back(f"the driver did not pin {format_bytes(size)} more")

    def _warn_before(self, allowed: int, limit_bytes: int) -> None:
        if not self._warned_before:
            self._warned_before = True
            _log.warning(
                "offload has nearly as much CPU memory pinned as it takes, %s of this machine's %s: beyond that it "
                "goes on in ordinary memory, whose copies are slower",
                format_bytes(allowed),
                format_bytes(limit_bytes),
            )

    def _fall_back(self, why: str) -> None:
        self.fallbacks += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"offload goes on in ordinary CPU memory, whose copies stop the host and are slower: {why}. Recompute "
                "more (backend torch), offload less (raise offload_min_bytes), or raise "
                "offload_pin_memory_max_buckets if sizes are what runs out.",
                stacklevel=2,
            )

    def _make_room(self, size: int) -> None:
        """Give sizes that nobody uses now back: beyond a step's need, or where another size wants their place."""
        need = _SLACK * max(self._most_asked_bytes, self._asked_bytes + size)
        for unused in list(self._free):
            too_many_sizes = size not in self._count and len(self._count) >= self.max_sizes > 0
            if self.total_bytes + size <= need and not too_many_sizes:
                return
            if self.total_bytes + size > need or len(self._free[unused]) == self._count[unused]:
                self._drop_free(unused)

    def _drop_free(self, size: int) -> None:
        for buffer in self._free.pop(size):
            self._drop(buffer)

    def _drop(self, buffer: Buffer) -> None:
        self.buffers -= 1
        self.total_bytes -= buffer.size
        self.pinned_bytes -= buffer.size if buffer.pinned else 0
        if buffer.pooled:
            self._count[buffer.size] -= 1
            if not self._count[buffer.size]:
                del self._count[buffer.size]


def _processes_here() -> int:
    """How many training processes share this machine's memory, as torchrun and accelerate tell each of them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else 1


def pool_for(device: torch.device, max_sizes: int) -> Pool:
    """Buffers for copies to and from a device: pinned, but for a simulated one."""
    return Pool(max_sizes, None if device.type == "cpu" else pinner(device))


def pinner(device: torch.device) -> Callable[[int], torch.Tensor | None]:
    """How to pin memory for copies to and from ``device``."""
    return _register_with_cuda if device.type == "cuda" else _allocate_pinned


def _register_with_cuda(size: int) -> torch.Tensor | None:
    mapped = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        _forget_last_error()
        return None
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False  # the process's end does it
    return tensor


def _forget_last_error() -> None:
    """A refused registration stays the runtime's last error, and the next kernel would be blamed for it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def _allocate_pinned(size: int) -> torch.Tensor | None:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None
