"""Links whose copies run late, for tests of the store without an accelerator."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime import store as store_module
from lowtide.runtime.link import HostLink


@dataclass(eq=False)
class LateEvent:
    """Stands behind the first ``position`` works of its lane."""

    lane: "LateLane"
    position: int = 0

    def synchronize(self) -> None:
        self.lane.run_to(self.position)


@dataclass
class Work:
    """A copy between two storages that must be alive when it runs; or, without them, a wait for another lane."""

    to: StorageWeakRef | None = None
    source: StorageWeakRef | None = None
    size: int = 0
    until: tuple["LateLane", int] | None = None


class LateLane:
    """One direction of copies, in order, as a stream. It holds no memory, as a stream does not."""

    def __init__(self, violations: list[str]) -> None:
        self.works: list[Work] = []
        self.done = 0
        self.violations = violations
        self.spare: list[LateEvent] = []

    def record(self) -> LateEvent:
        event = self.spare.pop() if self.spare else LateEvent(self)
        event.position = len(self.works)
        return event

    def give_back(self, event: LateEvent) -> None:
        assert event.lane is self
        self.spare.append(event)

    def run_to(self, position: int) -> None:
        while self.done < position:
            work = self.works[self.done]
            self.done += 1
            if work.until is not None:
                lane, there = work.until
                lane.run_to(there)
                continue
            assert work.to is not None and work.source is not None
            to, source = _bytes(work.to), _bytes(work.source)
            if to is None or source is None:
                self.violations.append(f"{'source' if source is None else 'destination'} freed before its copy ran")
            else:
                to[: work.size].copy_(source[: work.size])


def _bytes(reference: StorageWeakRef) -> torch.Tensor | None:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


class LateLink(HostLink):
    """Copies run only when somebody waits for them, the latest that a device may run them.

    without: orderings to leave out. log: (method, event or sizes) of every call. violations: copies from or to memory
    that had been freed. in_bytes: what was brought back so far.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.without = set(without)
        self.violations: list[str] = []
        self.out, self.back = LateLane(self.violations), LateLane(self.violations)  # type: ignore[assignment]
        self.log: list[tuple[str, Any]] = []
        self.in_bytes = 0
        self.fail_at: int | None = None  # batches in to come before one that fails
        self.out_fails = False

    def calls(self) -> list[str]:
        return [name for name, _ in self.log]

    def _note(self, name: str, about: Any = None) -> bool:
        self.log.append((name, about))
        return name not in self.without

    def source_is_ready(self) -> None:
        self._note("source_is_ready")

    def target_is_free(self) -> None:
        self._note("target_is_free")

    def buffer_is_free(self, busy: LateEvent) -> None:
        if self._note("buffer_is_free", busy):
            self.out.works.append(Work(until=(busy.lane, busy.position)))

    def buffer_is_full(self, copied: LateEvent) -> None:
        if self._note("buffer_is_full", copied):
            self.back.works.append(Work(until=(copied.lane, copied.position)))

    def source_may_go(self, copied: LateEvent) -> None:
        if self._note("source_may_go", copied):
            copied.synchronize()

    def target_is_ready(self, returned: LateEvent) -> None:
        if self._note("target_is_ready", returned):
            returned.synchronize()

    def target_is_read(self, value: torch.Tensor, stream: Any) -> None:
        self._note("target_is_read", value.untyped_storage().nbytes())

    def target_may_go(self, returned: LateEvent, stream: Any) -> None:
        if self._note("target_may_go", returned):
            returned.synchronize()

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LateEvent:  # type: ignore[override]
        self._note("copy_out", [source.nbytes for source, _ in copies])
        if self.out_fails:
            raise MemoryError("no memory left")
        for source, buffer in copies:
            self._append(self.out, buffer, source)
        return self.out.record()

    def copy_in(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LateEvent:  # type: ignore[override]
        self._note("copy_in", [target.nbytes for _, target in copies])
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise MemoryError("no memory left")
        for buffer, target in copies:
            self._append(self.back, target, buffer)
            self.in_bytes += target.nbytes
        return self.back.record()

    @staticmethod
    def _append(lane: LateLane, to: torch.Tensor, source: torch.Tensor) -> None:
        references = StorageWeakRef(to.untyped_storage()), StorageWeakRef(source.untyped_storage())
        lane.works.append(Work(*references, to.nbytes))

    def finish(self) -> None:
        """Run what is left."""
        self.out.run_to(len(self.out.works))
        self.back.run_to(len(self.back.works))


def use_link(monkeypatch: pytest.MonkeyPatch, link: HostLink) -> None:
    """Stores that copy for the first time from now on use this link."""
    monkeypatch.setattr(store_module, "link_to", lambda device: link)
