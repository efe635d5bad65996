"""What offload must survive, with copies that run as late as they may: every graph, as in test_segment_graphs.py."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from lowtide import testing
from tests.runtime.offload_settings import (
    ALL,
    DEPTH,
    PLAIN_BLOCKS,
    assert_same_and_moved,
    attached,
    settings,
    transformers,
)
from tests.runtime.toys import Block, Chain, assert_equal, inputs, second_order, step, twice

pytestmark = pytest.mark.usefixtures("on_the_cpu", "no_violations")


# ---------------------------------------------------------------------- graphs


@settings(ALL)
def test_two_forwards_before_one_backward(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.0), inputs()
    assert_same_and_moved(model, lambda: model(x) * model(x * 2), **setting)


@settings(ALL)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_backward_of_two_graphs_in_both_orders(setting: dict[str, Any], order: tuple[int, int]) -> None:
    model, x = transformers(), inputs()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        losses = [model(x).sum(), model(x * 2).square().sum()]
        grads = []
        for index in order:
            model.zero_grad()
            losses[index].backward()
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads

    plain = run()
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@settings(ALL)
def test_retain_graph_and_backward_twice(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.0), inputs()
    plain = twice(model, x)
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert_equal(plain, twice(model, x))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle.receipt().copies.d2h_bytes > 0


@settings(PLAIN_BLOCKS)
def test_double_backward(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)]), inputs().requires_grad_()
    plain = second_order(model, x)
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert_equal(plain, second_order(model, x))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@settings(ALL)
def test_dropped_graph_leaves_nothing(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    gc.collect()
    gc.disable()
    try:
        with attached(model, **setting) as handle:
            entry = x * 1
            alive = weakref.ref(entry.untyped_storage())
            output = model(entry)
            assert handle.receipt().copies.pool["in_use_bytes"] > 0
            del entry, output
            assert alive() is None
            assert handle.receipt().copies.pool["in_use_bytes"] == 0
    finally:
        gc.enable()


@settings(ALL)
def test_graph_made_before_detach_runs_backward_after_it_and_takes_the_pool_along(setting: dict[str, Any]) -> None:
    gc.collect()
    testing.release_pool()
    others = testing.pool_bytes()
    model, x = transformers(), inputs()
    plain = step(model, lambda: model(x))
    handle = attached(model, **setting)
    step(model, lambda: model(x))
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x).square().sum()
    handle.detach()
    assert testing.pool_bytes() > others
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]
    del loss
    assert testing.pool_bytes() == others


# ---------------------------------------------------------------------- threads


@settings({name: ALL[name] for name in ("unsloth", "unsloth in twos", "attention and ffn", "each its own")})
@pytest.mark.parametrize("shared", [False, True])
def test_two_threads_train_at_once(setting: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # each store with a link of its own
    with testing.cpu_offload():
        trained = [transformers(dropout=0.0)] * 2 if shared else [transformers(dropout=0.0), transformers(dropout=0.0)]
        x, found, errors = inputs(32), {}, []
        parameters = [list(model.parameters()) for model in trained]
        expected = [torch.autograd.grad(trained[k](x * (k + 1)).sum(), parameters[k]) for k in (0, 1)]

        def work(k: int) -> None:
            try:
                for _ in range(8):
                    found[k] = torch.autograd.grad(trained[k](x * (k + 1)).sum(), parameters[k])
            except Exception as error:  # noqa: BLE001  shown in the thread of the test
                errors.append(error)

        handles = [attached(model, **setting) for model in ({id(model): model for model in trained}).values()]
        threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for k in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(expected[k], found[k], strict=True))
        for handle in handles:
            assert handle.receipt().copies.pool["in_use_bytes"] == 0
            handle.detach()


@settings(ALL)
def test_backward_in_another_thread(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting) as handle:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(x).square().sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        assert handle.receipt().copies.d2h_bytes > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]
