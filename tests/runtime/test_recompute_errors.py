"""A recomputation that cannot be right is an error that names the block (rules 8, 10, 13), never a wrong gradient."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ReplayError
from tests.runtime.toys import Block, Chain, assert_equal, chain, inputs, step


def test_weight_changed_in_place_before_backward() -> None:
    model = chain(2)
    with lowtide.attach(model):
        loss = model(inputs()).sum()
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)
        with pytest.raises(ReplayError, match=r"blocks\.0: a weight of shape"):
            loss.backward()


def test_weight_exchanged_before_backward() -> None:
    model = chain(2)
    with lowtide.attach(model):
        loss = model(inputs()).sum()
        model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 2)
        with pytest.raises(ReplayError, match=r"blocks\.1: a weight of shape"):
            loss.backward()


def test_weight_data_exchanged_before_backward() -> None:
    model = chain(2)
    with lowtide.attach(model):
        loss = model(inputs()).sum()
        model.blocks[1].down.weight.data = model.blocks[1].down.weight.data * 2
        with pytest.raises(ReplayError, match="weight"):
            loss.backward()


def test_weights_moved_by_hooks_are_no_error() -> None:
    """A library that swaps weights in and out around each forward, as block swap and group offload do."""
    model, x = chain(3), inputs()
    plain = step(model, lambda: model(x))
    stored = {id(block): [p.data.clone() for p in block.parameters()] for block in model.blocks}

    def load(block: nn.Module, *_: object) -> None:
        for parameter, value in zip(block.parameters(), stored[id(block)], strict=True):
            parameter.data = value.clone()

    for block in model.blocks:
        block.register_forward_pre_hook(load)
    with lowtide.attach(model, interval=3) as handle:
        assert_equal(plain, step(model, lambda: model(x)))
        assert handle.receipt().totals["recompute_calls"] == 3


class Drifts(Block):
    """Another branch, shape or value on every second call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = self.calls % 2 == 1
        out = super().forward(x)
        if self.how == "more":
            return out.sin().cos() if again else out.sin()
        if self.how == "fewer":
            return out.sin() if again else out.sin().cos().exp()
        if self.how == "shape":
            return (torch.cat([out, out]) if again else out).sin()[: len(x)]
        return (out * (1.2 if again else 1.0)).sin()


@pytest.mark.parametrize(
    ("how", "message"), [("fewer", "saved"), ("shape", "was .* in forward"), ("value", "values .* differ")]
)
def test_recomputation_that_differs_names_the_block_and_likely_causes(how: str, message: str) -> None:
    torch.manual_seed(0)
    model = Chain([Block(), Drifts(how)])
    with lowtide.attach(model):
        loss = model(inputs()).sum()
        with pytest.raises(ReplayError, match=rf"blocks\.1 did not give .*{message}.*Likely causes"):
            loss.backward()


def test_extra_saved_tensors_are_an_error_where_the_replay_runs_to_its_end() -> None:
    torch.manual_seed(0)
    model = Chain([Drifts("more"), Block()])
    model.blocks[0].register_forward_hook(lambda *_: None)
    with lowtide.attach(model):
        loss = model(inputs()).sum()
        with pytest.raises(ReplayError, match=r"blocks\.0 did not give"):
            loss.backward()


def test_forward_hooks_run_on_recomputation_too() -> None:
    """Rule 12: an early stop would skip a hook that puts weights back, say."""
    model, x, seen = chain(3), inputs(), list[str]()
    for name, module in model.named_modules():
        if name.endswith("down"):
            module.register_forward_pre_hook(lambda *_, name=name: seen.append(f"in {name}"))
            module.register_forward_hook(lambda *_, name=name: seen.append(f"out {name}"))
    with lowtide.attach(model):
        step(model, lambda: model(x))
    assert sorted(seen) == sorted(f"{way} blocks.{i}.down" for i in range(3) for way in ("in", "out") for _ in range(2))


def test_early_stop_saves_the_tail_where_nothing_hooks() -> None:
    class Tail(Block):
        ended = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.ended += 1
            return out

    torch.manual_seed(0)
    model, x = Chain([Tail(), Tail()]), inputs()
    with lowtide.attach(model):
        step(model, lambda: model(x))
    assert [(block.calls, block.ended) for block in model.blocks] == [(2, 1), (2, 1)]
