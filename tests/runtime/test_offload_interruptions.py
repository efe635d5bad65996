"""What offload must survive, with copies that run as late as they may: exceptions, memory that runs out, steps
without gradients."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.awkward import Fails
from tests.runtime.links import LateLink
from tests.runtime.offload_settings import (
    ALL,
    DEPTH,
    PLAIN_BLOCKS,
    assert_same_and_moved,
    attached,
    settings,
    transformers,
)
from tests.runtime.toys import Block, Chain, assert_equal, inputs, step

pytestmark = pytest.mark.usefixtures("on_the_cpu", "no_violations")


@pytest.mark.parametrize("setting", PLAIN_BLOCKS.values(), ids=PLAIN_BLOCKS.keys())
@pytest.mark.parametrize("place", [0, 2, 5])
def test_exception_in_forward_then_a_good_step(setting: dict[str, Any], place: int) -> None:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block() for _ in range(DEPTH)]
    blocks[place] = Fails(when=2)
    model, x = Chain(blocks), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting) as handle:
        with pytest.raises(MemoryError):
            model(x)
        gc.collect()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle._store is not None and handle._store.in_flight_bytes == 0
        for _ in range(2):
            assert_equal(plain, step(model, lambda: model(x)))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_out_of_memory_in_a_replay_can_be_tried_again(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Fails(when=3), Block(), Block(), Block(), Block()]), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, backend="unsloth", interval=interval) as handle:
        model.zero_grad()
        loss = model(x).square().sum()
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@settings(ALL)
@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_out_of_memory_on_the_way_back_can_be_tried_again(
    setting: dict[str, Any], fail_at: int, late: LateLink
) -> None:
    model, x = transformers(dropout=0.0), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting):
        model.zero_grad()
        loss = model(x).square().sum()
        late.fail_at = fail_at
        try:
            loss.backward(retain_graph=True)
        except MemoryError:
            assert late.fail_at < 0
        else:
            assert late.fail_at >= 0
        late.fail_at = None
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@settings(ALL)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_moved_without_gradients(setting: dict[str, Any], context: Any, late: LateLink) -> None:
    model, x = transformers(), inputs()
    with attached(model, **setting) as handle:
        model.eval()
        with context():
            model(x)
        assert late.log == []
        assert handle.receipt().copies.pool["buffers"] == 0
        model.train()
        plain = step(model, lambda: model(x))
        moved, calls = handle.receipt().copies.d2h_bytes, len(late.log)
        with context():
            model(x)
        assert len(late.log) == calls
        assert handle.receipt().copies.d2h_bytes == moved > 0
        assert_equal(plain, step(model, lambda: model(x)))


@settings(ALL)
def test_eval_mode_with_gradients_is_treated(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.5).eval(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


def test_frozen_model_without_gradients_moves_nothing(late: LateLink) -> None:
    model, x = transformers().requires_grad_(False), inputs()
    with attached(model, backend="unsloth") as handle:
        model(x)
        late.finish()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle.receipt().totals["cpu_bytes"] == 0
