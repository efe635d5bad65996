"""Copies between an accelerator and CPU memory, beside the computation, in the right order.

Every ordering between two streams is one method here, so that each can be seen to matter: leave one out and a test on a
card computes wrong values. No stream is remembered between calls but the two of the copies: what is "current" is asked
each time (a cached one gave NaN under FSDP2). ``record_stream`` frees memory late and at no certain time, so it is left
to readers on another stream than the one that asked for the memory.
"""

import contextvars
import time
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.errors import ConfigError

simulated: contextvars.ContextVar[bool] = contextvars.ContextVar("lowtide offload on the CPU", default=False)
"""Whether offload of CPU tensors is on: see lowtide.testing.cpu_offload."""


def can_offload(device: torch.device) -> bool:
    """Whether what is there may wait in CPU memory: beside an accelerator, or where offload is simulated."""
    return device.type != "cpu" or simulated.get()


def accelerator_or_simulated() -> torch.device:
    """The device to offload from. ConfigError where there is none."""
    if simulated.get():
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise ConfigError(
            "offload needs an accelerator (CUDA, ROCm, XPU …), and torch sees none on this machine: on the CPU, "
            "activations are in CPU memory already. Use a backend that recomputes only (torch, torch-ffn, "
            "torch-selective) without offload_attention, or a plan by which nothing moves (`lowtide plan --host-memory "
            "0`), or try it out inside `lowtide.testing.cpu_offload()`."
        )
    return device


class Times:
    """Milliseconds of copying, and of the computation's standing still for it. Read when the device is done."""

    def __init__(self) -> None:
        self.copies: list[tuple[Any, Any]] = []
        self.waits: list[tuple[Any, Any]] = []
        self.host_ms = 0.0  # copies that the host made itself, all of them exposed

    def totals(self) -> tuple[float, float]:
        """(hidden, exposed) milliseconds. Waits until the copies of the step are done."""
        copied_ms, waited_ms = (sum(map(_elapsed_ms, pairs)) for pairs in (self.copies, self.waits))
        exposed_ms = min(waited_ms, copied_ms)
        return copied_ms - exposed_ms, exposed_ms + self.host_ms


def _elapsed_ms(pair: tuple[Any, Any]) -> float:
    start, end = pair
    end.synchronize()
    return start.elapsed_time(end)


class Lane:
    """One direction: a stream, and events of it to be used again.

    An event that is recorded anew while somebody still means its old record tells of a later point of the same stream,
    so that he waits longer, never shorter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)
        self._spare: list[torch.Event] = []

    def event(self) -> torch.Event:
        return self._spare.pop() if self._spare else torch.Event(self.device)

    def give_back(self, event: torch.Event) -> None:
        self._spare.append(event)


class StreamLink:
    """A device with streams: copies out and copies in each have one of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = Lane(device), Lane(device)
        self.times: Times | None = None
        self.full_through = 0  # copies in wait for this batch of copies out already
        self._order = torch.Event(device)  # recorded and waited for at once, so one is enough

    # ------------------------------------------------------------------ the orderings

    def source_is_ready(self) -> None:
        """A copy out begins after the computation that made its source."""
        self._order.record(self._current())
        self.out.stream.wait_event(self._order)

    def buffer_is_free(self, busy: torch.Event) -> None:
        """A copy out begins after the last copy in from the same buffer."""
        self.out.stream.wait_event(busy)

    def source_may_go(self, copied: torch.Event) -> None:
        """Memory of a source is used again only after it was copied: the computation waits for that."""
        self._wait(copied)

    def target_is_free(self) -> torch.Stream:
        """A copy in begins after the computation that used its target's memory before. Returns that one's stream."""
        stream = self._current()
        self._order.record(stream)
        self.back.stream.wait_event(self._order)
        return stream

    def buffer_is_full(self, copied: torch.Event) -> None:
        """A copy in begins after the copy out that filled the buffer."""
        self.back.stream.wait_event(copied)

    def target_is_ready(self, returned: torch.Event) -> None:
        """The computation reads a target after the copy in is done."""
        self._wait(returned)

    def target_is_read(self, value: torch.Tensor, stream: torch.Stream | None) -> None:
        """Another stream than the one whose memory it is reads the target: the memory waits for that one, too."""
        current = self._current()
        if stream is not None and current != stream:
            value.record_stream(current)

    def target_may_go(self, returned: torch.Event, stream: torch.Stream | None) -> None:
        """Memory of a target that nobody read is used again only after the copy in is done."""
        (stream or self._current()).wait_event(returned)

    # ------------------------------------------------------------------ copies

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
        """Copy each source (flat bytes on the device) to its buffer; the event tells when all are done."""
        return self._copy([(buffer, source) for source, buffer in copies], self.out)

    def copy_in(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
        """Copy each buffer to its target (flat bytes on the device); the event tells when all are done."""
        return self._copy([(target, buffer) for buffer, target in copies], self.back)

    def _copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], lane: Lane) -> torch.Event:
        done, stream = lane.event(), lane.stream
        before, index = self._current(), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)
        try:
            start = self._mark(stream)
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            done.record(stream)
            if start is not None and self.times is not None:
                self.times.copies.append((start, self._mark(stream)))
        finally:
            torch.accelerator.set_stream(before)
            if index != self.device.index:
                torch.accelerator.set_device_index(index)
        return done

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _wait(self, event: torch.Event) -> None:
        stream = self._current()
        start = self._mark(stream)
        stream.wait_event(event)
        if start is not None and self.times is not None:
            self.times.waits.append((start, self._mark(stream)))

    def _mark(self, stream: torch.Stream) -> torch.Event | None:
        if self.times is None:
            return None
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event


class HostLink:
    """A device without streams, or the CPU itself: the host makes each copy and waits for it."""

    out = back = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: Times | None = None
        self.full_through = 0

    def source_is_ready(self) -> None: ...

    def buffer_is_free(self, busy: Any) -> None: ...

    def source_may_go(self, copied: Any) -> None: ...

    def target_is_free(self) -> None: ...

    def target_is_read(self, value: torch.Tensor, stream: Any) -> None: ...

    def buffer_is_full(self, copied: Any) -> None: ...

    def target_is_ready(self, returned: Any) -> None: ...

    def target_may_go(self, returned: Any, stream: Any) -> None: ...

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for source, buffer in copies:
            self._copy(buffer, source)

    def copy_in(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for buffer, target in copies:
            self._copy(target, buffer)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        start = time.perf_counter()
        to.copy_(source)
        if self.times is not None:
            self.times.host_ms += (time.perf_counter() - start) * 1e3


Link = StreamLink | HostLink


def link_to(device: torch.device) -> Link:
    """The link to ``device``; by the host where it has no streams."""
    if device.type == "cpu":
        return HostLink(device)
    try:
        return StreamLink(device)
    except (RuntimeError, NotImplementedError):
        return HostLink(device)
