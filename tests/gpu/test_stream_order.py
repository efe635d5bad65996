"""Each ordering between the streams of offload, against a stream that stalls: right with it, wrong without it.

The adversaries drive the store itself. A stall of the card (a fraction of a second) stands where a busy machine could
put one, so that what must wait would certainly be early. Where two orderings of one stream imply each other, the second
part runs under another current stream, which nothing else makes wait.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lowtide.runtime.link import HostLink, StreamLink
from lowtide.runtime.store import Store, Ticket

NUMBERS = 4 * 2**20
SIZE = 4 * NUMBERS  # bytes; from 10 MiB on, torch's allocator gives each tensor memory of its own
STALL_CYCLES = 600_000_000  # a third of a second


def filled(value: float) -> torch.Tensor:
    return torch.full((NUMBERS,), value, device="cuda")


def stall(stream: Any = None) -> None:
    with stream if stream is not None else nullcontext():
        torch.cuda._sleep(STALL_CYCLES)


def are_all(tensor: torch.Tensor, value: float) -> bool:
    torch.cuda.synchronize()
    return bool((tensor == value).all())


def clean() -> None:
    """No free memory is left for the allocator to choose from but what the test frees next."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def warm_store(in_flight_bytes: int = 0) -> tuple[Store, Any]:
    """A store whose pool holds one buffer of SIZE, and its link. Sources go at once, up to in_flight_bytes."""
    store = Store(min_bytes=1, in_flight_bytes=in_flight_bytes, prefetch_bytes=0)
    ticket = moved(store, filled(1.0))
    link = ticket.entry.link
    assert are_all(store.get(ticket), 1.0)
    del ticket
    clean()
    return store, link


def moved(store: Store, tensor: torch.Tensor) -> Ticket:
    ticket = store.move(tensor)
    assert ticket is not None
    store.flush()
    return ticket


# ------------------------------------------------------------------ the adversaries: do they end with right values?


def source_is_ready() -> bool:
    """The computation that makes the source is late."""
    store, _ = warm_store()
    x = filled(0.0)
    torch.cuda.synchronize()
    stall()
    ticket = moved(store, x.add_(7.0))
    return are_all(store.get(ticket), 7.0)


def source_may_go() -> bool:
    """The copy out is late, and the source's memory is written to again."""
    store, link = warm_store()
    x = filled(7.0)
    address = x.data_ptr()
    torch.cuda.synchronize()
    stall(link.out.stream)
    ticket = moved(store, x)
    del x
    y = torch.empty(NUMBERS, device="cuda")
    assert y.data_ptr() == address
    y.fill_(9.0)
    return are_all(store.get(ticket), 7.0)


def buffer_is_full() -> bool:
    """The copy out is late, and a stream that does not wait for it asks for the values."""
    store, link = warm_store()
    x = filled(7.0)
    torch.cuda.synchronize()
    stall(link.out.stream)
    with torch.cuda.stream(torch.cuda.Stream()):
        ticket = moved(store, x)
    return are_all(store.get(ticket), 7.0)


def buffer_is_free() -> bool:
    """The copy in is late, and its buffer is filled again, from a stream that does not wait for it."""
    store, link = warm_store()
    ticket, x = moved(store, filled(7.0)), filled(9.0)
    buffer = ticket.entry.buffer
    torch.cuda.synchronize()
    stall(link.back.stream)
    value = store.get(ticket)
    del ticket
    with torch.cuda.stream(torch.cuda.Stream()):
        second = moved(store, x)
    assert second.entry.buffer is buffer
    return are_all(value, 7.0)


def target_is_free() -> bool:
    """The computation that reads the target's memory as somebody else's is late."""
    store, _ = warm_store()
    ticket = moved(store, filled(7.0))
    clean()
    x, seen = filled(5.0), filled(0.0)
    address = x.data_ptr()
    torch.cuda.synchronize()
    stall()
    seen.copy_(x)
    del x
    value = store.get(ticket)
    assert value.data_ptr() == address
    return are_all(seen, 5.0) and are_all(value, 7.0)


def target_is_ready() -> bool:
    """The copy in is late, and the values are read at once."""
    store, link = warm_store()
    ticket = moved(store, filled(7.0))
    clean()
    x = filled(5.0)
    address = x.data_ptr()
    del x
    torch.cuda.synchronize()
    stall(link.back.stream)
    value = store.get(ticket)
    assert value.data_ptr() == address
    return are_all(value.clone(), 7.0)


def target_may_go() -> bool:
    """The copy in is late, nobody reads it, and its target's memory is written to again."""
    first, _second, address = _brought_back_late()
    del first
    y = torch.empty(NUMBERS, device="cuda")
    assert y.data_ptr() == address
    return are_all(y.fill_(9.0), 9.0)


def _brought_back_late() -> tuple[Ticket, Ticket, int]:
    """A ticket whose values are on their way back and stalled, the one after it, which was read, and where they go."""
    store, link = warm_store(in_flight_bytes=SIZE)
    first = moved(store, filled(7.0))
    second = moved(store, filled(8.0))  # now the first source goes; the second stays as long as its ticket
    clean()
    stall(link.back.stream)
    store.get(second)
    assert first.entry.target is not None
    return first, second, first.entry.target.data_ptr()


ADVERSARIES: dict[str, Callable[[], bool]] = {
    adversary.__name__: adversary
    for adversary in (
        source_is_ready,
        source_may_go,
        buffer_is_full,
        buffer_is_free,
        target_is_free,
        target_is_ready,
        target_may_go,
    )
}


@pytest.mark.parametrize("ordering", list(ADVERSARIES))
def test_values_are_right_and_without_the_ordering_wrong(ordering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = ADVERSARIES[ordering]
    assert all(adversary() for _ in range(2))
    monkeypatch.setattr(StreamLink, ordering, lambda link, *event: None)
    assert not adversary(), "the adversary sees nothing"
    monkeypatch.undo()
    assert adversary()


def test_every_ordering_has_its_adversary() -> None:
    orderings = {name for name in vars(HostLink) if name.startswith(("source_", "buffer_", "target_"))}
    assert orderings - {"target_is_read"} == ADVERSARIES.keys()  # that one's adversary is the last test


# ------------------------------------------------------------------ readers on other streams


def test_what_nobody_read_is_dropped_under_another_stream() -> None:
    """The target belongs to the stream that it was allocated on: that one must wait, not the current one."""
    first, _second, address = _brought_back_late()
    with torch.cuda.stream(torch.cuda.Stream()):
        del first
    y = torch.empty(NUMBERS, device="cuda")
    assert y.data_ptr() == address
    assert are_all(y.fill_(9.0), 9.0)


def test_what_is_brought_back_on_one_stream_is_read_on_another() -> None:
    """The target's memory is used again only when the other stream has read it."""
    first, second, _ = _brought_back_late()
    with torch.cuda.stream(torch.cuda.Stream()):
        value = second.entry.store.get(first)
        seen = torch.zeros(NUMBERS, device="cuda")
        stall()
        seen.copy_(value)
        del value, first
    y = torch.empty(NUMBERS, device="cuda").fill_(9.0)
    assert are_all(seen, 7.0) and are_all(y, 9.0)
