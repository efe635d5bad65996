"""Storages that wait in CPU memory: which, whose bytes come back, and for how long memory is held."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide import testing
from lowtide.errors import ConfigError, ReplayError
from lowtide.runtime.placeholder import Weight, unpack
from lowtide.runtime.pool import Pool
from lowtide.runtime.store import Store, Ticket
from tests.runtime.links import LateLink, use_link
from tests.runtime.toys import assert_equal, chain, inputs, step

FLOAT = 4


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with testing.cpu_offload():
        yield


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateLink:
    link = LateLink()
    use_link(monkeypatch, link)
    return link


def store_of(model: nn.Module | None = None, **options: Any) -> Store:
    store = Store(model, **{"min_bytes": 1, **options})
    store.begin_step(timed=False)
    return store


@contextmanager
def saving(store: Store) -> Iterator[None]:
    with saved_tensors_hooks(store.pack, unpack):
        try:
            yield
        finally:
            store.flush()


def moved(store: Store, *tensors: torch.Tensor) -> list[Ticket]:
    tickets = [store.move(tensor) for tensor in tensors]
    store.flush()
    assert all(ticket is not None for ticket in tickets)
    return tickets  # type: ignore[return-value]


def assert_gave_all_back(store: Store) -> None:
    assert store.pool.in_use_bytes == 0
    assert store.in_flight_bytes == 0
    assert store.ahead_bytes == 0


def gradients(store: Store, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    def run() -> torch.Tensor:
        with saving(store):
            return model(x)

    return step(model, run)


# ---------------------------------------------------------------------- what is copied


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype and a.shape == b.shape


VIEWS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "gapped views of a fused projection": lambda: list(_made(6, 48).chunk(3, dim=-1)),
    "a square and its transpose": lambda: [base := _made(8, 8), base.t(), base[::2], base.t()[1:]],
    "one expanded": lambda: [_made(4, 1).expand(4, 9)],
    "slices at offsets": lambda: [base := _made(64), base[10:20], base[11:21], base[5], base[40:]],
    "other shapes": lambda: [base := _made(4, 6), base.view(24), base.permute(1, 0), base.unsqueeze(0)],
    "other types": lambda: [base := torch.arange(64, dtype=torch.int32), base.view(torch.int16), base.view(torch.int8)],
    "complex": lambda: [base := torch.randn(8, 8, dtype=torch.complex64), torch.view_as_real(base)],
    "overlapping windows": lambda: [_made(16).unfold(0, 4, 1)],
}


def _made(*shape: int) -> torch.Tensor:
    """A tensor with a graph, as activations have, and a storage of its own."""
    return torch.randn(*shape, requires_grad=True) * 2


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
    store, x = store_of(), _made(64)
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


# ---------------------------------------------------------------------- what stays


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("table", torch.randn(6, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.table, torch.Tensor)
        return self.frozen(self.linear(x)) * self.table * self.frozen.weight.detach()[:6]


def packed(store: Store, run: Callable[[], torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that move, tensors that stay) of what ``run`` saves."""
    goes: list[torch.Tensor] = []
    stays: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Ticket | Weight:
        found = store.pack(tensor)
        (goes if isinstance(found, Ticket) else stays).append(tensor.detach())
        return found

    with saved_tensors_hooks(pack, unpack):
        run().sum().backward()
    return goes, stays


def test_parameters_and_buffers_stay_also_as_views() -> None:
    model = Weights()
    x = torch.randn(6, 16, requires_grad=True) * 1
    goes, stays = packed(store_of(model), lambda: model(x))
    weights = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}
    assert {tensor.untyped_storage()._cdata for tensor in stays} <= weights
    assert len(stays) >= 3
    assert goes and not {tensor.untyped_storage()._cdata for tensor in goes} & weights


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_stay_without_a_model_to_tell(trained: bool) -> None:
    layer, x = nn.Linear(16, 16).requires_grad_(trained), torch.randn(6, 16, requires_grad=True) * 1
    _, stays = packed(store_of(), lambda: layer(x) * layer.weight[:6])
    assert {tensor.untyped_storage()._cdata for tensor in stays} == {layer.weight.untyped_storage()._cdata}


def test_weights_exchanged_since_the_last_step_stay() -> None:
    model, x = Weights(), torch.randn(6, 16, requires_grad=True) * 1
    store = store_of(model)
    model.table = torch.randn(6, 16)
    store.begin_step(timed=False)
    _, stays = packed(store, lambda: model(x))
    assert model.table.untyped_storage()._cdata in {tensor.untyped_storage()._cdata for tensor in stays}


def test_dequantised_weight_stays() -> None:
    """A quantised layer makes its weight anew at each call; backward needs it anyway, and it is no activation."""
    quantised, x = torch.randint(-8, 8, (16, 16), dtype=torch.int8), torch.randn(6, 16, requires_grad=True) * 1
    goes, stays = packed(store_of(), lambda: F.linear(x, quantised.float() * 0.1).sin())
    assert [tuple(tensor.shape) for tensor in goes] == [(6, 16)]
    assert [tuple(tensor.shape) for tensor in stays] == [(16, 16)]


@pytest.mark.parametrize("trained", [True, False])
def test_weight_cast_by_autocast_stays(trained: bool) -> None:
    layer, x = nn.Linear(16, 16).requires_grad_(trained), torch.randn(6, 16, requires_grad=True) * 1
    with torch.autocast("cpu", torch.bfloat16):
        goes, stays = packed(store_of(layer), lambda: layer(x).sin())
    assert (16, 16) not in [tuple(tensor.shape) for tensor in goes]
    assert (16, 16) in [tuple(tensor.shape) for tensor in stays]


def test_activation_cast_by_autocast_moves() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(6, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        goes, _ = packed(store_of(layer), lambda: layer(x))
    assert [tuple(tensor.shape) for tensor in goes] == [(6, 16)]


class Subclass(torch.Tensor):
    pass


def _nested() -> torch.Tensor:
    return torch._nested_tensor_from_tensor_list([torch.randn(3, 4), torch.randn(2, 4)])  # type: ignore[attr-defined]


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "subclass": lambda: torch.randn(64).as_subclass(Subclass),
    "parameter": lambda: nn.Parameter(torch.randn(64)),
    "leaf that gets a gradient": lambda: torch.randn(64, requires_grad=True),
    "sparse": lambda: torch.eye(64).to_sparse(),
    "sparse rows": lambda: torch.eye(64).to_sparse_csr(),
    "conjugate view": lambda: torch.randn(64, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((64,)),
    "nested": _nested,
    "on the meta device": lambda: torch.empty(64, device="meta"),
    "empty": lambda: torch.empty(0),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", ODD)
def test_what_has_no_plain_storage_stays(name: str) -> None:
    store, tensor = store_of(), ODD[name]()
    assert store.move(tensor) is None
    assert store.hold(tensor) is None
    store.flush()
    assert store.counts.d2h_bytes == 0


def test_small_storages_stay() -> None:
    store, x = store_of(min_bytes=1024), _made(256)
    assert store.move(x[:2]) is not None  # what counts is the storage
    assert store.move(_made(255)) is None


def test_tensors_of_inference_mode_move() -> None:
    store = store_of()
    with torch.inference_mode():
        text = torch.randn(64)
    expected, ticket = text.clone(), moved(store, text)[0]
    assert moved(store, text)[0].entry is ticket.entry
    del text
    assert torch.equal(ticket.take(), expected)


def test_what_is_held_on_the_device_anyway_is_not_copied_and_the_other_way_round() -> None:
    store, held, gone = store_of(), _made(64), _made(64)
    assert store.hold(held) is None
    assert store.move(held) is None
    tickets = moved(store, gone)
    also = store.hold(gone)
    assert also is not None and also.entry is tickets[0].entry
    del held
    assert all(store.move(_made(64)) is not None for _ in range(20))  # some at its address


def test_without_an_accelerator_it_is_an_error() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")

    def outside() -> None:
        with pytest.raises(ConfigError, match=r"needs an accelerator .*cpu_offload"):
            Store()

    worker = threading.Thread(target=outside)  # the simulation is of the thread that asked for it
    worker.start()
    worker.join()


# ---------------------------------------------------------------------- graphs


def test_gradients_are_those_of_a_plain_run(late: LateLink) -> None:
    model, x = chain(dropout=0.2), inputs()
    plain, store = step(model, lambda: model(x)), store_of(model)
    for _ in range(3):
        assert_equal(plain, gradients(store, model, x))
    assert store.counts.d2h_bytes > 0
    late.finish()
    assert late.violations == []
    assert_gave_all_back(store)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("bound", [0, 2000, None])
def test_several_graphs_in_flight(late: LateLink, order: tuple[int, int], bound: int | None) -> None:
    model, x = chain(dropout=0.2), inputs()
    store = store_of(model, in_flight_bytes=bound, prefetch_bytes=bound)

    def run(hold: Callable[[], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with hold():
            losses = [model(x).sum(), model(x * 2).square().sum()]
        found = []
        for index in order:
            model.zero_grad()
            losses[index].backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    plain = run(lambda: saving_nothing())
    assert all(torch.equal(a, b) for a, b in zip(plain, run(lambda: saving(store)), strict=True))
    assert late.violations == []
    assert_gave_all_back(store)


@contextmanager
def saving_nothing() -> Iterator[None]:
    yield


def test_retain_graph_and_backward_twice(late: LateLink) -> None:
    model, x, store = chain(), inputs(), store_of()

    def twice() -> dict[str, torch.Tensor]:
        model.zero_grad()
        with saving(store):
            loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    found = twice()
    plain = step(model, lambda: model(x))
    for name, gradient in found.items():
        assert torch.equal(gradient, plain[name] + plain[name] + plain[name])  # type: ignore[operator]
    assert store.counts.d2h_bytes > 0
    assert late.violations == []
    assert_gave_all_back(store)


def test_double_backward(late: LateLink) -> None:
    model, x = chain(), inputs().requires_grad_()
    store = store_of()

    def second_order(around: Callable[[], Any]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with around():
            output = model(x).square().sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        grad.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = second_order(saving_nothing)
    for _ in range(3):
        assert_equal(plain, second_order(lambda: saving(store)))
    assert late.violations == []
    assert_gave_all_back(store)


def test_values_that_somebody_keeps_are_not_brought_back_again() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, keep: bool) -> torch.Tensor:
            output = x.sin()
            ctx.save_for_backward(output)
            ctx.keep = keep
            return output * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (value,) = ctx.saved_tensors
            if ctx.keep:
                kept.append(value)
            return grad * value, None

    store, x = store_of(), torch.randn(64, requires_grad=True)
    with saving(store):
        output = x
        for number in range(4):
            output = Keeps.apply(output, number < 3)
    output.sum().backward(retain_graph=True)
    first = store.counts.h2d_bytes
    for _ in range(3):
        output.sum().backward(retain_graph=True)
        assert store.ahead_bytes == 0
    assert first == 4 * x.nbytes
    assert store.counts.h2d_bytes == first + 3 * x.nbytes  # the last one's, which nobody kept


def test_a_value_read_while_an_earlier_reader_has_it_is_the_same_memory() -> None:
    store, x = store_of(), _made(64)
    ticket = moved(store, x)[0]
    del x
    first = ticket.take()
    second = ticket.take()
    assert first.data_ptr() == second.data_ptr()
    assert store.counts.h2d_bytes == 256
    del first, second
    ticket.take()
    assert store.counts.h2d_bytes == 512


@pytest.mark.parametrize("backward", [False, True])
def test_dropped_graph_gives_every_buffer_back(late: LateLink, backward: bool) -> None:
    model, x, store = chain(), inputs(), store_of()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with saving(store):
                output = model(x)
            assert store.pool.in_use_bytes > 0
            if backward:
                output.sum().backward(retain_graph=True)
            del output
            assert_gave_all_back(store)
        late.finish()
        assert late.violations == []
    finally:
        gc.enable()


def test_exception_in_forward(late: LateLink) -> None:
    model, x, store = chain(), inputs(), store_of()
    plain = step(model, lambda: model(x))
    hook = model.blocks[2].register_forward_pre_hook(_fail)
    with pytest.raises(ArithmeticError), saving(store):
        model(x)
    hook.remove()
    gc.collect()
    assert_gave_all_back(store)
    assert_equal(plain, gradients(store, model, x))
    assert_gave_all_back(store)


def _fail(*_: Any) -> None:
    raise ArithmeticError("as planned")


def test_exception_in_backward_waits_for_what_was_brought_back_and_not_read(late: LateLink) -> None:
    model, x, store = chain(), inputs(), store_of(in_flight_bytes=0)
    plain = step(model, lambda: model(x))
    with saving(store):
        hidden = model.blocks[1](model.blocks[0](x))
        hidden.register_hook(_fail)
        output = model.blocks[3](model.blocks[2](hidden))
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert store.ahead_bytes > 0
    del output, hidden
    gc.collect()
    assert "target_may_go" in late.calls()
    late.finish()
    assert late.violations == []
    assert_gave_all_back(store)
    assert_equal(plain, gradients(store, model, x))


@pytest.mark.parametrize(("most", "fail_at"), [(0, 0), (0, 1), (0, 2), (0, 5), (10**9, 0), (10**9, 1)])
def test_out_of_memory_on_the_way_back_can_be_tried_again(late: LateLink, most: int, fail_at: int) -> None:
    model, x, store = chain(2), inputs(), store_of(in_flight_bytes=0, prefetch_bytes=most)
    plain = step(model, lambda: model(x))
    model.zero_grad()
    with saving(store):
        output = model(x)
    late.fail_at = fail_at
    with pytest.raises(MemoryError):
        output.square().sum().backward(retain_graph=True)
    late.fail_at = None
    model.zero_grad()
    output.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]
    del output
    late.finish()
    assert late.violations == []
    assert_gave_all_back(store)


def test_out_of_memory_on_the_way_out_leaves_the_sources_and_gives_the_buffers_back(late: LateLink) -> None:
    store, x = store_of(), _made(64)
    late.out_fails = True
    ticket = store.move(x)
    assert ticket is not None
    with pytest.raises(MemoryError):
        store.flush()
    assert torch.equal(ticket.take(), x)
    del ticket
    assert_gave_all_back(store)
    late.out_fails = False
    assert torch.equal(moved(store, x)[0].take(), x)


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


# ---------------------------------------------------------------------- bounds


def deep(store: Store, depth: int, x: torch.Tensor) -> tuple[torch.Tensor, list[StorageWeakRef]]:
    """sin after sin: each saves its argument, which nobody else holds."""
    storages = []
    with saved_tensors_hooks(store.pack, unpack):
        for _ in range(depth):
            x = x.sin()
            storages.append(StorageWeakRef(x.untyped_storage()))
            store.flush()
    return x, storages


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


# ---------------------------------------------------------------------- orders of copies


def test_order_of_calls(late: LateLink) -> None:
    model, x = chain(3), inputs()
    store = store_of(model, in_flight_bytes=2000, prefetch_bytes=2000)
    for _ in range(3):
        gradients(store, model, x)
    calls, copied, returned = late.log, set(), set()
    for place, (name, about) in enumerate(calls):
        if name == "copy_out":
            since = [n for n, _ in calls[:place] if n in ("copy_out", "source_is_ready")]
            assert since[-1] == "source_is_ready"
        elif name == "copy_in":
            since = [n for n, _ in calls[:place] if n in ("copy_in", "target_is_free")]
            assert since[-1] == "target_is_free"
            assert "buffer_is_full" in [n for n, _ in calls[:place]]
        elif name == "source_may_go":
            copied.add(id(about))
        elif name == "target_is_ready":
            returned.add(id(about))
    names = late.calls()
    assert names.count("target_is_ready") >= names.count("copy_in") > 0
    assert "buffer_is_free" in names  # the second step's copies out go to buffers of the first one's
    assert names.index("buffer_is_free") > names.index("copy_in")
    assert copied and returned


def test_a_buffer_that_is_used_again_is_waited_for(late: LateLink) -> None:
    store = store_of(in_flight_bytes=0)
    ticket = moved(store, torch.ones(64))[0]
    value = ticket.take()
    del ticket
    late.log.clear()
    again = moved(store, torch.zeros(64))[0]
    assert [name for name, _ in late.log[:3]] == ["source_is_ready", "buffer_is_free", "copy_out"]
    assert late.log[1][1].lane is late.back
    assert torch.equal(value, torch.ones(64))
    assert torch.equal(again.take(), torch.zeros(64))


@pytest.mark.parametrize("ordering", ["source_may_go", "target_is_ready"])
def test_leaving_an_ordering_out_shows(monkeypatch: pytest.MonkeyPatch, ordering: str) -> None:
    """The late link would not notice if the store never called it."""
    link = LateLink(without={ordering})
    use_link(monkeypatch, link)
    model, x = chain(3), inputs()
    plain, store = step(model, lambda: model(x)), store_of(model, in_flight_bytes=0)
    found = gradients(store, model, x)
    link.finish()
    assert link.violations or not all(torch.equal(plain[name], found[name]) for name in plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("without", [(), ("target_may_go",)])
def test_a_target_that_nobody_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]) -> None:
    link = LateLink(without)
    use_link(monkeypatch, link)
    store, x = store_of(in_flight_bytes=0), torch.randn(64, requires_grad=True)
    output, _ = deep(store, 10, x)
    last = output.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert last is not None and last._saved_self is not None  # type: ignore[attr-defined]
    assert store.ahead_bytes > 0
    del output, last
    link.finish()
    assert bool(link.violations) == bool(without)
    assert_gave_all_back(store)


def test_buffers_are_waited_for_before_they_are_freed(late: LateLink) -> None:
    store = store_of(in_flight_bytes=10**9)
    ticket = moved(store, torch.ones(64))[0]
    store.close()
    assert store.pool.total_bytes > 0  # its graph lives
    del ticket
    assert store.pool.total_bytes == 0
    late.finish()
    assert late.violations == []


def test_times_of_host_copies_are_exposed_ones() -> None:
    model, x, store = chain(), inputs(), store_of()
    store.begin_step(timed=True)
    gradients(store, model, x)
    copies = store.copies()
    assert copies.hidden_copy_ms == 0 and copies.exposed_copy_ms > 0
    assert copies.d2h_bytes == copies.h2d_bytes > 0
    assert copies.pool["in_use_bytes"] == 0 and copies.pool["pageable_bytes"] == store.pool.total_bytes


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


# ---------------------------------------------------------------------- threads


def _in_threads(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  shown below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("shared", [False, True])
def test_threads(shared: bool) -> None:
    models, x = [chain(4), chain(4)], inputs(64)
    expected = [torch.autograd.grad(model(x * k).sum(), list(model.parameters())) for k, model in enumerate(models, 1)]
    common = store_of()
    stores = [common if shared else store_of(model) for model in models]
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(20):
            with saving(stores[k]):
                loss = models[k](x * (k + 1)).sum()
            found[k] = torch.autograd.grad(loss, list(models[k].parameters()))

    _in_threads([lambda: work(0), lambda: work(1)])
    for k in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(expected[k], found[k], strict=True))
        assert_gave_all_back(stores[k])


def test_two_threads_read_one_graph() -> None:
    model, x, store = chain(6), inputs(64), store_of()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), parameters)
    with saving(store):
        losses = [model(x).sum()]
    found: list[Any] = []

    def work() -> None:
        for _ in range(10):
            found.append(torch.autograd.grad(losses[0], parameters, retain_graph=True))

    _in_threads([work, work])
    assert len(found) == 20
    for gradients_ in found:
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients_, strict=True))
    losses.clear()
    assert_gave_all_back(store)
