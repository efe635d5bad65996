"""CPU buffers: their sizes, when one is used again, how much is kept, and what happens where nothing can be pinned."""

import random
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch

from lowtide.runtime.host_memory import HostMemory
from lowtide.runtime.pool import SHARE_OF_MACHINE, Buffer, Pool, size_class

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Pins:
    """Pretends to pin; refuses beyond ``most_bytes``."""

    def __init__(self, most_bytes: int = GIB) -> None:
        self.most_bytes = most_bytes
        self.sizes: list[int] = []

    def __call__(self, size: int) -> torch.Tensor | None:
        if sum(self.sizes) + size > self.most_bytes:
            return None
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)


class Busy:
    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def unlimited() -> HostMemory | None:
    return None


def pool(max_sizes: int = 12, pins: Pins | None = None, memory: Callable[[], HostMemory | None] = unlimited) -> Pool:
    return Pool(max_sizes, pins if pins is not None else Pins(), memory)


def take_and_give(where: Pool, sizes: list[int]) -> list[Buffer]:
    """One step: all at once, then all back."""
    buffers = [where.take(size) for size in sizes]
    for buffer in buffers:
        where.give(buffer)
    return buffers


# ---------------------------------------------------------------------- sizes


def test_size_classes_fit_and_waste_little() -> None:
    chosen = random.Random(0)
    sizes = [1, 4095, 4096, 4097, *(64 * KIB + n for n in range(-1, 2)), 2**31 + 1, 3 * GIB]
    sizes += [chosen.randrange(64 * KIB, 8 * GIB) for _ in range(2000)]
    for size in sizes:
        classed = size_class(size)
        assert classed >= size
        assert classed % 4096 == 0
        assert size_class(classed) == classed
        if size >= 64 * KIB:
            assert classed <= size * 1.032 or classed - size < 4096


def test_size_classes_are_few_and_in_order() -> None:
    classes = [size_class(size) for size in range(MIB, 2 * MIB, 1000)]
    assert classes == sorted(classes)
    assert len(set(classes)) <= 33
    assert max(2**20 / size_class(2**20 - 20_000), size_class(2**20 + 20_000) / 2**20) < 1.05


def test_a_buffer_holds_what_was_asked_for() -> None:
    where = pool()
    for size in (1, 5000, MIB + 1):
        buffer = where.take(size)
        assert buffer.tensor.nbytes == buffer.size == size_class(size)
        buffer.tensor[:size].fill_(1)


# ---------------------------------------------------------------------- used again


def test_a_free_buffer_of_the_size_is_used_again() -> None:
    pins = Pins()
    where = pool(pins=pins)
    first = where.take(MIB)
    second = where.take(MIB)
    assert first is not second
    where.give(first)
    assert where.take(MIB - 100) is first
    assert len(pins.sizes) == 2


def test_a_larger_free_buffer_is_used_before_a_new_one_is_made_but_not_a_much_larger_one() -> None:
    pins = Pins()
    where = pool(pins=pins)
    small, large, huge = (where.take(size) for size in (MIB, int(1.5 * MIB), 8 * MIB))
    for buffer in (huge, large):
        where.give(buffer)
    assert where.take(MIB) is large
    assert where.take(3 * MIB) is not huge
    where.give(small)
    assert where.take(2 * MIB).size == 2 * MIB  # one that is too small is none


def test_the_nearest_larger_size_is_taken() -> None:
    where = pool()
    buffers = [where.take(size) for size in (2 * MIB, int(1.25 * MIB), int(1.5 * MIB))]
    for buffer in buffers:
        where.give(buffer)
    assert where.take(MIB) is buffers[1]


def test_the_same_steps_pin_once() -> None:
    pins = Pins()
    where = pool(pins=pins)
    sizes = [MIB, 2 * MIB, MIB, 5 * MIB, 100 * KIB] * 3
    for _ in range(50):
        take_and_give(where, sizes)
    assert len(pins.sizes) == len(sizes)
    assert where.statistics() == {
        "pinned_bytes": sum(map(size_class, sizes)),
        "pageable_bytes": 0,
        "in_use_bytes": 0,
        "buffers": len(sizes),
        "sizes": 4,
        "fallbacks": 0,
    }


# ---------------------------------------------------------------------- bounds


@pytest.mark.parametrize("max_sizes", [1, 3, 12])
def test_beyond_the_most_sizes_it_falls_back_with_one_warning(max_sizes: int) -> None:
    pins = Pins()
    where = pool(max_sizes, pins)
    sizes = [MIB * 3**n // 2**n for n in range(max_sizes + 3)]

    def step() -> None:
        buffers = [where.take(size) for size in sizes]
        assert [buffer.pinned for buffer in buffers] == [True] * max_sizes + [False] * 3
        assert where.statistics()["sizes"] == max_sizes
        assert where.statistics()["pageable_bytes"] == sum(buffer.size for buffer in buffers[-3:])
        for buffer in reversed(buffers):
            where.give(buffer)
        assert where.statistics()["pageable_bytes"] == 0  # not kept

    with pytest.warns(UserWarning, match=f"ordinary CPU memory.*keep {max_sizes} distinct sizes") as caught:
        step()
    assert len(caught) == 1
    step()  # warnings are errors here
    step()
    assert where.statistics()["fallbacks"] == 9
    assert len(pins.sizes) == max_sizes


def test_a_size_that_nobody_uses_makes_place_for_another() -> None:
    where = pool(2)
    take_and_give(where, [MIB, 10 * MIB])
    take_and_give(where, [10 * MIB])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = where.take(100 * MIB)
    assert buffer.pinned
    assert where.statistics()["sizes"] == 2
    where.give(buffer)
    assert 10 * MIB in where._free  # the one used least recently went
    assert where.statistics()["fallbacks"] == 0


def test_no_sizes_at_all_means_nothing_is_pinned_and_nothing_is_said() -> None:
    pins = Pins()
    where = pool(0, pins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            buffers = take_and_give(where, [MIB * n for n in range(1, 20)])
    assert not any(buffer.pinned for buffer in buffers)
    assert pins.sizes == []
    statistics = where.statistics()
    assert statistics["buffers"] == 19  # kept and used again all the same
    assert statistics["pinned_bytes"] == statistics["fallbacks"] == 0


def test_refused_pinning_falls_back_with_one_warning_and_the_buffer_is_kept() -> None:
    pins = Pins(most_bytes=5 * MIB)
    where = pool(pins=pins)
    with pytest.warns(UserWarning, match=r"the driver did not pin 2\.00 MiB more") as caught:
        take_and_give(where, [2 * MIB] * 4)
    assert len(caught) == 1
    take_and_give(where, [2 * MIB] * 4)
    statistics = where.statistics()
    assert statistics["pinned_bytes"] == statistics["pageable_bytes"] == 4 * MIB
    assert statistics["buffers"] == 4
    assert statistics["fallbacks"] == 2


def test_it_pins_at_most_a_share_of_the_machine_and_tells_before(caplog: pytest.LogCaptureFixture) -> None:
    where = pool(memory=lambda: HostMemory(10 * MIB, 10 * MIB))
    take_and_give(where, [MIB] * 5)
    assert not caplog.messages
    with pytest.warns(UserWarning, match=r"of this machine's 10\.0 MiB \(control group included\)") as caught:
        take_and_give(where, [MIB] * 9)
    assert len(caught) == 1
    (told,) = caplog.messages
    assert "nearly as much CPU memory pinned as it takes, 6.00 MiB of this machine's 10.0 MiB" in told
    assert where.statistics()["pinned_bytes"] == SHARE_OF_MACHINE * 10 * MIB
    assert where.statistics()["fallbacks"] == 3


def test_processes_of_one_machine_share_what_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    where = pool(memory=lambda: HostMemory(10 * MIB, 10 * MIB))
    assert where.take(2 * MIB).pinned
    with pytest.warns(UserWarning, match=r"2\.00 MiB is the most"):
        assert not where.take(MIB).pinned


def test_it_pins_only_what_is_free() -> None:
    free = [4 * MIB]
    where = pool(memory=lambda: HostMemory(100 * MIB, free[0]))
    assert where.take(3 * MIB).pinned
    free[0] = MIB
    with pytest.warns(UserWarning, match=r"1\.00 MiB are free"):
        assert not where.take(3 * MIB).pinned


@pytest.mark.parametrize("max_sizes", [0, 4, 12])
@pytest.mark.filterwarnings("ignore:offload goes on in ordinary CPU memory")
def test_changing_sizes_keep_at_most_half_more_than_the_largest_step(max_sizes: int) -> None:
    where, chosen, largest = pool(max_sizes), random.Random(1), 0
    for _ in range(200):
        length = chosen.randrange(64 * KIB, 4 * MIB)
        sizes = [length * factor for factor in (1, 1, 3, 4, 1)] * chosen.randrange(1, 6)
        take_and_give(where, sizes)
        largest = max(largest, sum(sizes))
        assert where.total_bytes <= 1.5 * largest


def test_books_agree_with_the_buffers_whatever_happens() -> None:
    chosen = random.Random(2)
    pins = Pins()
    where = pool(5, pins, lambda: HostMemory(400 * MIB, 400 * MIB))
    out: list[Buffer] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3000):
            if out and chosen.random() < 0.5:
                where.give(out.pop(chosen.randrange(len(out))))
            else:
                out.append(where.take(chosen.randrange(1, 8 * MIB)))
            if chosen.random() < 0.01:
                where.trim()
            free = [buffer for buffers in where._free.values() for buffer in buffers]
            assert where.in_use_bytes == sum(buffer.size for buffer in out)
            assert where.total_bytes == sum(buffer.size for buffer in (*out, *free))
            assert where.pinned_bytes == sum(buffer.size for buffer in (*out, *free) if buffer.pinned)
            assert where.buffers == len(out) + len(free)
            assert len({buffer.size for buffer in (*out, *free) if buffer.pooled}) <= 5
            assert not {id(buffer) for buffer in out} & {id(buffer) for buffer in free}


# ---------------------------------------------------------------------- the end


def test_trim_frees_what_nobody_uses() -> None:
    where = pool()
    used, free = where.take(MIB), where.take(2 * MIB)
    where.give(free)
    where.trim()
    assert where.total_bytes == where.in_use_bytes == MIB
    where.give(used)
    assert where.take(MIB) is used


def test_close_frees_all_now_or_as_it_comes_back() -> None:
    where = pool()
    used, free = where.take(MIB), where.take(2 * MIB)
    where.give(free)
    where.close()
    assert where.total_bytes == MIB
    where.give(used)
    assert where.total_bytes == where.buffers == where.pinned_bytes == 0
    where.give(where.take(MIB))
    assert where.total_bytes == 0


@pytest.mark.parametrize("how", ["trim", "close", "close before", "make room", "not kept"])
def test_a_busy_buffer_is_waited_for_before_it_is_freed(how: str) -> None:
    where, busy = pool(1), Busy()
    other = where.take(8 * MIB) if how == "not kept" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = where.take(MIB)
    buffer.busy = busy
    if how == "close before":
        where.close()
        assert busy.waits == 0
    where.give(buffer)
    memory = weakref.ref(buffer)
    del buffer
    if how == "trim":
        where.trim()
    elif how == "close":
        where.close()
    elif how == "make room":
        where.take(64 * MIB)
    assert memory() is None
    assert busy.waits == 1
    assert where.buffers == (other is not None) + (how == "make room")


def test_a_busy_buffer_is_not_waited_for_when_it_is_used_again() -> None:
    """The copy that fills it waits by itself, on the device."""
    where, busy = pool(), Busy()
    buffer = where.take(MIB)
    buffer.busy = busy
    where.give(buffer)
    assert where.take(MIB) is buffer
    assert busy.waits == 0


def test_threads_never_share_a_buffer() -> None:
    where, taken, twice = pool(pins=Pins(2**60)), set(), []  # sizes come and go as threads meet

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(2000):
            buffer = where.take(chosen.choice([MIB, 2 * MIB, 3 * MIB]))
            if id(buffer) in taken:
                twice.append(buffer)
            taken.add(id(buffer))
            taken.discard(id(buffer))
            where.give(buffer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []
    assert where.in_use_bytes == 0
    assert where.buffers <= 12
