"""Whose bytes come back from CPU memory: of views, at addresses used again, of what changed in place."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import ReplayError
from lowtide.runtime.placeholder import unpack
from tests.runtime.links import LateLink
from tests.runtime.stores import assert_gave_all_back, made, moved, saving, store_of
from tests.runtime.toys import assert_equal, step

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT = 4


# ---------------------------------------------------------------------- what is copied


VIEWS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "gapped views of a fused projection": lambda: list(made(6, 48).chunk(3, dim=-1)),
    "a square and its transpose": lambda: [base := made(8, 8), base.t(), base[::2], base.t()[1:]],
    "one expanded": lambda: [made(4, 1).expand(4, 9)],
    "slices at offsets": lambda: [base := made(64), base[10:20], base[11:21], base[5], base[40:]],
    "other shapes": lambda: [base := made(4, 6), base.view(24), base.permute(1, 0), base.unsqueeze(0)],
    "other types": lambda: [base := torch.arange(64, dtype=torch.int32), base.view(torch.int16), base.view(torch.int8)],
    "complex": lambda: [base := torch.randn(8, 8, dtype=torch.complex64), torch.view_as_real(base)],
    "overlapping windows": lambda: [made(16).unfold(0, 4, 1)],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_from_one_copy_of_their_storage(name: str) -> None:
    store, views = store_of(), VIEWS[name]()
    size = views[0].untyped_storage().nbytes()
    expected = [view.detach().clone(memory_format=torch.preserve_format) for view in views]
    strides = [view.stride() for view in views]
    tickets = moved(store, *views)
    dead = StorageWeakRef(views[0].untyped_storage())
    del views
    assert dead.expired()  # the store holds none of it on the device
    assert store.counts.d2h_bytes == size
    back = [ticket.take() for ticket in tickets]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, expected, strict=True))
    assert [value.stride() for value in back] == strides
    assert len({value.untyped_storage()._cdata for value in back}) == 1
    assert store.counts.h2d_bytes == size
    del tickets, back
    assert_gave_all_back(store)


def test_gradients_through_a_fused_projection_with_one_copy() -> None:
    x, fused = torch.randn(2, 6, 16), nn.Linear(16, 48)

    def run() -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in fused(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(query, key, value) * query

    plain, store, copied = step(fused, run), store_of(fused), []

    def stored() -> torch.Tensor:
        with saving(store):
            output = run()
        copied.append(store.counts.d2h_bytes)
        return output

    assert_equal(plain, step(fused, stored))
    attended = 2 * 2 * 6 * 8 * FLOAT  # attention's output, saved twice
    statistics = 2 * 2 * 6 * FLOAT
    assert copied == [x.nbytes + 2 * 6 * 48 * FLOAT + attended + statistics]


def test_a_storage_is_copied_once_while_its_source_lives_and_again_when_it_changed() -> None:
    store, x = store_of(), made(64)
    first = moved(store, x)[0]
    second = moved(store, x * 1, x)[1]
    assert first.entry is second.entry
    assert store.counts.d2h_bytes == 2 * x.nbytes
    before = x.detach().clone()
    with torch.no_grad():
        x.add_(1)
    third = moved(store, x)[0]
    assert third.entry is not first.entry
    assert torch.equal(third.take(), x)
    assert torch.equal(first.take(), before)


@pytest.mark.parametrize("keeps", [1, 3, 7])
def test_an_address_used_again_never_gives_another_tensors_bytes(keeps: int) -> None:
    store, addresses, kept = store_of(), set(), []
    for number in range(300):
        tensor = torch.full((1000,), float(number))
        addresses.add(tensor.data_ptr())
        ticket = moved(store, tensor)[0]
        if number % keeps == 0:
            kept.append((number, ticket))
        del tensor, ticket
    assert len(addresses) < 300  # else the test shows nothing
    for number, ticket in (*kept[::2], *reversed(kept[1::2])):
        assert torch.equal(ticket.take(), torch.full((1000,), float(number)))
    assert store.counts.d2h_bytes == 300 * 4000
    kept.clear()
    del ticket
    assert_gave_all_back(store)


def test_an_address_used_again_within_one_batch_of_copies(late: LateLink) -> None:
    store, tickets = store_of(in_flight_bytes=0), []
    for number in range(100):
        tickets.append(store.move(torch.full((1000,), float(number))))
        if number % 7 == 0:
            store.flush()
    store.flush()
    values = [ticket.take()[0].item() for ticket in tickets]  # type: ignore[union-attr]
    assert values == [float(number) for number in range(100)]
    assert late.violations == []


# ---------------------------------------------------------------------- changed in place


@pytest.mark.parametrize("when", ["before its copy was asked for", "while its copy waits"])
def test_source_changed_in_place_is_an_error(late: LateLink, when: str) -> None:
    store = store_of(in_flight_bytes=10**9)
    store.block_name = "blocks.7"
    x = torch.randn(64, requires_grad=True) * 1
    with saved_tensors_hooks(store.pack, unpack):
        loss = x.sin().sum()
    if when != "before its copy was asked for":
        store.flush()
    x.add_(1)
    store.flush()
    with pytest.raises(ReplayError, match=r"blocks\.7 saved .*modified by an inplace"):
        loss.backward()


def test_source_changed_before_it_could_go_is_an_error_afterwards(late: LateLink) -> None:
    store = store_of(in_flight_bytes=0)
    x = torch.randn(64, requires_grad=True) * 1
    with saved_tensors_hooks(store.pack, unpack):
        loss = x.sin().sum()
    x.add_(1)
    store.flush()  # copies, and lets go at once
    del x
    with pytest.raises(ReplayError, match="modified by an inplace"):
        loss.backward()


def test_source_changed_after_its_copy_was_made_does_no_harm(late: LateLink) -> None:
    store = store_of(in_flight_bytes=0)
    leaf = torch.randn(64, requires_grad=True)
    x = leaf * 1
    with saving(store):
        loss = x.sin().sum()
    expected = x.detach().cos()
    with torch.no_grad():
        x.zero_()
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], expected)


def test_weight_changed_in_place_is_an_error() -> None:
    layer, x, store = nn.Linear(16, 16), torch.randn(6, 16, requires_grad=True) * 1, store_of()
    with saving(store):
        loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(ReplayError, match="modified by an inplace"):
        loss.backward()
