"""Peaks of real steps, counted storage by storage on the CPU, beside those forecast from shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.bench.synthetic import Synthetic
from lowtide.measure.adapter import add_lora
from lowtide.measure.cards import find_card
from lowtide.measure.forecast import forecast
from lowtide.measure.meta_copy import on_meta, shapes_of
from lowtide.measure.residents import block_gradients
from lowtide.plan.assignment import assignment_of, schedule_of
from lowtide.plan.costs import StepCosts
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.pool import Buffer, Pool
from lowtide.runtime.resolve import resolve
from lowtide.testing import cpu_offload

DEPTH, WIDTH, HEADS, TOKENS = 6, 64, 2, 256
TENSOR = WIDTH * TOKENS * 4
"""Bytes of one activation; a block saves eleven."""
MIN_BYTES = 16 * 1024
WITHIN = 5


class Live(TorchDispatchMode):
    """The most bytes that tensors take while backward runs, without those that wait in buffers of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.counts = False
        self.apart: set[int] = set()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu":
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        if self.counts:
            self.most = max(self.most, sum(size for key, (_, size) in self._known.items() if key not in self.apart))
        return out


@contextmanager
def buffers_apart(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take = Pool.take

    def taken(pool: Pool, size: int) -> Buffer:
        buffer = take(pool, size)
        live.apart.add(buffer.tensor.untyped_storage()._cdata)
        return buffer

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "take", taken)
        yield


def model_of(trained: str) -> nn.Module:
    """What comes before the blocks is not held by the caller, as in real models."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Synthetic(DEPTH, WIDTH, HEADS), nn.Linear(WIDTH, 1))
    if trained == "lora":
        model.requires_grad_(False)
        add_lora(model, resolve(model, None), 4, torch.float32)
    return model


def costs_of(model: nn.Module) -> StepCosts:
    shadow = on_meta(model)
    stacks = resolve(shadow, None)
    inputs = shapes_of({"input": torch.empty(1, TOKENS, WIDTH)})
    costs = forecast(shadow, stacks, inputs, find_card("H200"), 0, min_bytes=MIN_BYTES)
    trained = costs.with_gradients(block_gradients(shadow, stacks, costs.stacks))
    return trained.with_relief(1.0)  # these attention sides need less than feed-forward sides


def live_peak(model: nn.Module, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the second step, whose buffers are there already."""
    x = torch.randn(1, TOKENS, WIDTH)
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=MIN_BYTES):
        model(x).mean().backward()
        model.zero_grad()
        live = Live()
        with live, buffers_apart(live, monkeypatch):
            loss = model(x).mean()
            live.counts = True
            loss.backward()
    model.zero_grad()
    return live.most


@pytest.mark.parametrize("trained", ["lora", "all"])
@pytest.mark.parametrize(
    "words",
    [
        ["whole"] * DEPTH,
        ["selective"] * DEPTH,
        ["ffn"] * DEPTH,
        ["kept+attention"] * (DEPTH - 1) + ["kept"],
        ["kept+saved"] * (DEPTH - 1) + ["kept"],
        ["whole+boundary"] * (DEPTH - 1) + ["whole"],
        ["ffn+attention+boundary"] * (DEPTH - 1) + ["ffn"],
        ["selective+attention+boundary"] * (DEPTH - 1) + ["kept"],
        ["whole+boundary", "whole", "ffn", "kept+attention", "kept+saved", "kept"],
        ["ffn+boundary", "selective", "kept+attention", "ffn+attention+boundary", "kept", "ffn"],
    ],
    ids=lambda words: f"{words[0]}…{words[-1]}",
)
def test_a_peak_is_forecast_to_a_few_tensors(trained: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 66 that a plain step keeps; the gradients of a block that is trained are three. What is the same in all steps
    is no matter here."""
    model = model_of(trained)
    costs = costs_of(model)
    assert all(size > 2.9 * TENSOR for size in costs.gradient_bytes.values()) == (trained == "all")
    (stack,) = costs.stacks
    plain, treated = (assignment_of(costs, Schedule({stack: mixed(of_all)})) for of_all in (["kept"] * DEPTH, words))
    expected = [predict_step(costs, assignment).peak_bytes for assignment in (plain, treated)]
    found = [live_peak(model, schedule_of(assignment), monkeypatch) for assignment in (plain, treated)]
    saved_bytes = expected[0] - expected[1]
    assert saved_bytes > 10 * TENSOR
    assert abs(saved_bytes - (found[0] - found[1])) <= WITHIN * TENSOR, [found, expected]
