"""Graphs whose storages wait in CPU memory: retained, dropped, interrupted, read by several threads."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.runtime.links import LateLink
from tests.runtime.stores import assert_gave_all_back, gradients, made, moved, saving, store_of
from tests.runtime.toys import assert_equal, chain, inputs, step

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
    store, x = store_of(), made(64)
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
    store, x = store_of(), made(64)
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
