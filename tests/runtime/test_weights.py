"""Which storages are a model's weights, as the model is now; and that this is found without a walk at each step."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.weights import WeightKeys
from lowtide.testing import cpu_offload


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Identity()
        self.register_buffer("table", torch.randn(4))
        self.register_parameter("bias", None)


class Model(nn.Module):
    """The same part at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])
        self.again = self.parts[0]
        self.register_buffer("table", torch.randn(4))


def of(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}


class Walked(Model):
    walks = 0

    def modules(self) -> Iterator[nn.Module]:
        self.walks += 1
        return super().modules()


def test_all_weights_are_found_with_one_walk() -> None:
    model = Walked()
    keys = WeightKeys(model)
    expected = of(model)
    assert len(expected) == 3 * 3 + 1
    model.walks = 0
    assert [keys.now() for _ in range(3)] == [expected] * 3
    assert model.walks == 1


def _in_place(model: Model) -> None:
    model.parts[1].table.data = torch.randn(4)


def _buffer(model: Model) -> None:
    model.parts[2].table = torch.randn(4)


def _parameter(model: Model) -> None:
    model.parts[2].linear.weight = nn.Parameter(torch.randn(4, 4))


def _none(model: Model) -> None:
    model.parts[1].bias = nn.Parameter(torch.randn(4))


def _leaf(model: Model) -> None:
    model.parts[1].act.register_buffer("scale", torch.randn(1))


def _leaf_child(model: Model) -> None:
    model.parts[1].act.add_module("inner", nn.Linear(4, 4))


def _replaced(model: Model) -> None:
    model.parts[1].linear = nn.Linear(4, 4)


def _removed(model: Model) -> None:
    del model.parts[2]


def _swapped(model: Model) -> None:
    model.parts[1].linear, model.parts[2].linear = model.parts[2].linear, model.parts[1].linear


@pytest.mark.parametrize(
    "change", [_in_place, _buffer, _parameter, _none, _leaf, _leaf_child, _replaced, _removed, _swapped]
)
def test_what_changed_since_is_seen(change: Callable[[Model], None]) -> None:
    model = Model()
    keys = WeightKeys(model)
    before = keys.now()
    change(model)
    assert keys.now() == of(model)
    assert (keys.now() == before) == (change is _swapped)


def test_a_module_at_the_address_of_one_that_is_gone_is_another() -> None:
    model = Model()
    keys = WeightKeys(model)
    for _ in range(200):
        keys.now()
        model.parts[1].act = None  # its memory is free for the next of its size
        model.parts[1].act = nn.Linear(2, 2)
        assert keys.now() == of(model)


def test_nothing_is_kept_alive() -> None:
    model = Model()
    keys = WeightKeys(model)
    keys.now()
    gone = [weakref.ref(model), weakref.ref(model.parts[1]), weakref.ref(model.table)]
    del model
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert keys.now() == set()


# ---------------------------------------------------------------------- weights that blocks do not have to themselves


class Block(nn.Module):
    def __init__(self, scripted: bool = False) -> None:
        super().__init__()
        plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.side = torch.jit.script(plain) if scripted else plain
        self.register_buffer("table", torch.randn(8, 16))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.side(self.before(x) * self.table * table))


class Chain(nn.Module):
    """Each block is given a table of the last one."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(scripted) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.blocks[-1].table)
        return x


@pytest.mark.parametrize("words", [["kept+saved"], ["whole+boundary"], ["kept+saved", "whole+boundary"]], ids="+".join)
@pytest.mark.parametrize("scripted", [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:.*jit"))])
def test_no_weight_moves_whoever_has_it(words: list[str], scripted: bool) -> None:
    """Scripted code saves weights as plain tensors that have a graph."""
    torch.manual_seed(0)
    model, x = Chain(scripted), torch.randn(2, 8, 16)

    def gradients() -> list[Any]:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        return [weight.grad for weight in model.parameters()]

    gradients()
    plain = gradients()
    schedule = Schedule({"blocks": mixed([words[place % len(words)] for place in range(4)])})
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=1) as handle:
        for _ in range(3):  # scripted code is compiled by what it saw
            assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))
        totals = handle.receipt().totals
    assert 0 < totals["d2h_bytes"] == totals["cpu_bytes"]
