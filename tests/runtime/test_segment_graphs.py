"""What a segment must survive: every graph, retained, dropped, of several steps, models and threads."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import lowtide
from tests.runtime.awkward import INTERVALS
from tests.runtime.toys import assert_equal, assert_same_as_plain, chain, inputs, second_order, step, twice


def test_retain_graph_and_backward_twice() -> None:
    model, x = chain(), inputs()
    plain = twice(model, x)
    for setting in INTERVALS:
        with lowtide.attach(model, **setting):  # type: ignore[arg-type]
            assert_equal(plain, twice(model, x))


def test_double_backward() -> None:
    model, x = chain(), inputs().requires_grad_()
    plain = second_order(model, x)
    for setting in INTERVALS:
        with lowtide.attach(model, **setting) as handle:  # type: ignore[arg-type]
            assert_equal(plain, second_order(model, x))
            assert handle.receipt().totals["recompute_calls"] > 0


def test_two_forwards_before_one_backward_and_interleaved() -> None:
    model, x = chain(), inputs()

    def run() -> torch.Tensor:
        first, second = model(x), model(x * 2)
        return first * second

    for setting in INTERVALS[:3]:
        assert_same_as_plain(model, run, recomputed=8, **setting)


def test_backward_of_an_older_graph_after_a_newer_forward() -> None:
    model, x = chain(dropout=0.3), inputs()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        older, newer = model(x).sum(), model(x * 2).square().sum()
        grads = []
        for loss in (older, newer):
            model.zero_grad()
            loss.backward()
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads

    plain = run()
    with lowtide.attach(model, interval=2):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))


def test_gradient_accumulation() -> None:
    model, x = chain(dropout=0.2), inputs()

    def accumulate() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        for scale in (1.0, 2.0, 3.0):
            model(x * scale).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = accumulate()
    with lowtide.attach(model, interval=2) as handle:
        assert all(torch.equal(a, b) for a, b in zip(plain, accumulate(), strict=True))
        assert handle.receipt().totals["recompute_calls"] == 4  # the receipt is of the last micro-batch


def test_dropped_graph_leaves_nothing() -> None:
    model, x = chain(), inputs()
    gc.collect()
    gc.disable()
    try:
        with lowtide.attach(model, interval=2):
            entry = x * 1
            alive = weakref.ref(entry.untyped_storage())
            output = model(entry)
            del entry, output
            assert alive() is None
    finally:
        gc.enable()


def test_backward_in_another_thread() -> None:
    model, x = chain(dropout=0.3), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=2) as handle:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(x).square().sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        assert handle.receipt().totals["recompute_calls"] == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]


def test_two_threads_train_one_model_at_once() -> None:
    model, x = chain(8), inputs(64)
    expected = [torch.autograd.grad(model(x * k).sum(), list(model.parameters())) for k in (1, 2)]
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(5):
            found[k] = torch.autograd.grad(model(x * k).sum(), list(model.parameters()))

    with lowtide.attach(model, interval=2):
        workers = [threading.Thread(target=work, args=(k,)) for k in (1, 2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for k in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(expected[k - 1], found[k], strict=True))


def test_eval_mode_with_gradients_is_treated() -> None:
    model, x = chain(dropout=0.5).eval(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_happens_without_gradients(context: Any) -> None:
    model, x = chain(), inputs()
    with lowtide.attach(model, interval=2) as handle:
        with context():
            model(x)
        assert all(block.reason == "not called" for block in handle.receipt().blocks)
        assert handle.receipt().warnings
        step(model, lambda: model(x))
        with context():
            model(x)
        assert handle.receipt().totals["recompute_calls"] == 4


def test_no_memory_is_kept_over_a_hundred_steps_evaluations_and_new_shapes() -> None:
    model = chain(3, dropout=0.1)
    with lowtide.attach(model, interval=2) as handle:
        gc.collect()
        before = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        gc.disable()
        try:
            for number in range(100):
                step(model, lambda rows=1 + number % 7: model(inputs(rows)))
                if number % 10 == 0:
                    with torch.no_grad():
                        model(inputs())
                    model(inputs())  # a graph that is dropped
            model.zero_grad(set_to_none=True)
            after = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        finally:
            gc.enable()
        assert after <= before
        assert handle.receipt().totals["recompute_calls"] == 3


def test_two_models_with_different_settings() -> None:
    first, second, x = chain(4), chain(4), inputs()
    plain = step(first, lambda: first(x))
    with lowtide.attach(first, interval=2) as a, lowtide.attach(second, interval=1, segment_stride=2) as b:
        assert_equal(plain, step(first, lambda: first(x)))
        assert_equal(plain, step(second, lambda: second(x)))
        assert a.receipt().totals["recompute_calls"] == 4
        assert b.receipt().totals["recompute_calls"] == 2


def test_graph_made_before_detach_runs_backward_after_it() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    handle = lowtide.attach(model, interval=2)
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x).square().sum()
    handle.detach()
    loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


def test_forwards_without_backward_do_not_make_the_books_grow() -> None:
    model = chain(2)
    with lowtide.attach(model) as handle:
        for _ in range(40):
            model(inputs())
        storages = handle._ledger.storages
        assert storages is not None
        held = len(storages.held)
        model(inputs())
        assert len(storages.held) == held
        step(model, lambda: model(inputs()))
        assert handle.receipt().totals["recompute_calls"] == 2
