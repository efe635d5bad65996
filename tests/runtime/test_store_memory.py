"""How much memory a store holds: on the device within its bounds, in CPU memory over many steps."""

import random

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.placeholder import unpack
from lowtide.runtime.pool import Pool
from lowtide.runtime.store import Ticket
from tests.runtime.links import LateLink
from tests.runtime.stores import assert_gave_all_back, deep, gradients, store_of
from tests.runtime.toys import chain, inputs

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---------------------------------------------------------------------- bounds


@pytest.mark.parametrize("most", [0, 1, 4])
def test_at_most_the_bound_is_held_on_the_device_in_forward(late: LateLink, most: int) -> None:
    x = torch.randn(64, requires_grad=True)
    store, size, storages = store_of(in_flight_bytes=most * 256), 256, []
    with saved_tensors_hooks(store.pack, unpack):
        hidden = x
        for _ in range(20):
            hidden = hidden.sin()
            storages.append(StorageWeakRef(hidden.untyped_storage()))
            store.flush()
            held = sum(not storage.expired() for storage in storages[:-1])  # the last one is hidden itself
            assert held <= most
            assert store.in_flight_bytes <= most * size
    assert held == most  # and no less: what is still there need not come back


def test_source_that_is_still_there_is_used_as_it_is(late: LateLink) -> None:
    store, x = store_of(in_flight_bytes=3 * 256), torch.randn(64, requires_grad=True)
    output, _ = deep(store, 10, x)
    output.sum().backward()
    assert store.counts.d2h_bytes == 9 * 256  # a leaf's stays, the output is not saved
    assert store.counts.h2d_bytes == 6 * 256
    assert late.in_bytes == 6 * 256


@pytest.mark.parametrize("most", [0, 256, 1024, 3000])
def test_at_most_the_bound_is_brought_back_ahead(late: LateLink, most: int) -> None:
    store, x = store_of(in_flight_bytes=0, prefetch_bytes=most), torch.randn(64, requires_grad=True)
    plain = torch.autograd.grad(_sins(x, 30).sum(), x)[0]
    ahead: list[int] = []

    def read(ticket: Ticket) -> torch.Tensor:
        value = ticket.take()
        ahead.append(late.in_bytes - sum(isinstance(t, Ticket) for t in reads) * 256 - 256)
        reads.append(ticket)
        return value

    for _ in range(3):
        late.in_bytes, reads = 0, []
        with saved_tensors_hooks(
            store.pack, lambda packed: read(packed) if isinstance(packed, Ticket) else packed.take()
        ):
            output = x
            for _ in range(30):
                output = output.sin()
                store.flush()
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)
        assert len(reads) == 29
        del output
        reads.clear()
    assert max(256, most - 255) <= max(ahead) <= max(256, most)  # one at least: it is wanted next
    assert store.counts.h2d_bytes == store.counts.d2h_bytes
    assert late.violations == []
    assert_gave_all_back(store)


def _sins(x: torch.Tensor, depth: int) -> torch.Tensor:
    for _ in range(depth):
        x = x.sin()
    return x


def test_prefetch_comes_before_the_read(late: LateLink) -> None:
    store, x = store_of(in_flight_bytes=0, prefetch_bytes=1024), torch.randn(64, requires_grad=True)
    for _ in range(5):
        output, _ = deep(store, 30, x)
        output.sum().backward()
        assert store.counts.prefetch_misses == 1  # the first read: nothing told that backward would begin
        store.begin_step(timed=False)


def test_bounds_follow_the_block_that_moves_most_and_do_not_creep(late: LateLink) -> None:
    store, x = store_of(), torch.randn(64, requires_grad=True)
    for _ in range(20):
        store.begin_step(timed=False)
        with saved_tensors_hooks(store.pack, unpack):
            store.enter_block(0, "blocks.0")
            hidden = _sins(x, 3)
            store.flush()
        held = store.in_flight_bytes
        assert store._largest_block_bytes == 512
        hidden.sum().backward()
        del hidden
    store.begin_step(timed=False)
    with saved_tensors_hooks(store.pack, unpack):
        hidden = _sins(x, 30)
    store.flush()
    assert held == 512
    assert store.in_flight_bytes >= 29 * 256  # one block, however much it moves
    del hidden
    with saved_tensors_hooks(store.pack, unpack):
        for number in range(1, 30):
            store.enter_block(number, f"blocks.{number}")
            x = x.sin()
            store.flush()
    assert store.in_flight_bytes <= 29 * 256


# ---------------------------------------------------------------------- many steps


def test_a_hundred_steps_need_the_buffers_of_one() -> None:
    model, x, store = chain(3), inputs(512), store_of()
    gradients(store, model, x)
    after_one = store.pool.total_bytes
    for _ in range(100):
        store.begin_step(timed=False)
        gradients(store, model, x)
        assert store.pool.total_bytes == after_one
    assert len(store._order) + len(store._queue) + len(store._entries) < 10_000
    assert_gave_all_back(store)


def test_books_do_not_grow_with_the_steps(late: LateLink) -> None:
    store, x = store_of(in_flight_bytes=1024), torch.randn(64, requires_grad=True)
    sizes = []
    for number in range(120):
        output, _ = deep(store, 30, x)
        if number % 3:
            output.sum().backward()
        del output
        sizes.append(len(store._order) + len(store._queue) + len(store._entries))
    assert max(sizes[60:]) <= max(sizes[:60])


ROWS = {
    "grow": [64 * n for n in range(8, 40)],
    "shrink": [64 * n for n in range(40, 8, -1)],
    "alternate": [2048, 512, 1536, 640] * 8,
    "like lengths": [1024 + n % 50 for n in range(0, 400, 7)],
    "by chance": [random.Random(0).randrange(256, 2560) for _ in range(60)],
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:offload goes on in ordinary CPU memory")
def test_changing_shapes_need_at_most_half_more_than_the_largest_step(name: str, pinned: bool) -> None:
    model, store, largest = chain(2), store_of(min_bytes=2**15), 0
    if pinned:
        store.pool = Pool(12, lambda size: torch.empty(size, dtype=torch.uint8), lambda: None)
    for rows in ROWS[name]:
        store.begin_step(timed=False)
        gradients(store, model, inputs(rows))
        largest = max(largest, store.counts.d2h_bytes)
        assert store.pool.total_bytes <= 1.5 * largest
    assert store.counts.d2h_bytes > 0
    assert_gave_all_back(store)
