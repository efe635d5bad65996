"""What a segment must survive: interruptions, and changes in place that are an error in a plain run, too."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from lowtide import families
from lowtide.errors import ConfigError, ReplayError
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from tests.runtime.awkward import ChangesArgument, Fails
from tests.runtime.toys import Block, Chain, assert_equal, chain, inputs, step


def test_inplace_change_of_an_external_before_backward_is_an_error() -> None:
    model, x = chain(2), inputs()
    with lowtide.attach(model):
        entry = x * 1
        loss = model(entry).sum()
        entry.add_(1)
        with pytest.raises(ReplayError, match=r"blocks\.0 .*modified by an inplace"):
            loss.backward()


def test_block_that_changes_its_argument_is_an_error_at_forward() -> None:
    torch.manual_seed(0)
    model = Chain([Block(), ChangesArgument()])
    with lowtide.attach(model), pytest.raises(ReplayError, match=r"blocks\.1.*modified by an inplace"):
        model(inputs())


def test_saved_tensor_changed_in_place_inside_a_block_is_an_error_as_in_a_plain_run() -> None:
    class Spoils(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = torch.sigmoid(x)
            product = gate.exp()
            gate.mul_(2)
            return super().forward(gate * product)

    torch.manual_seed(0)
    model, x = Chain([Spoils(), Spoils()]), inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).sum().backward()
    with lowtide.attach(model), pytest.raises(ReplayError, match="modified by an inplace"):
        model(x).sum().backward()


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_exception_in_forward_then_a_good_step(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Block(), Fails(when=2), Block()]), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=interval) as handle:
        with pytest.raises(MemoryError):
            model(x)
        assert_equal(plain, step(model, lambda: model(x)))
        assert handle.receipt().totals["recompute_calls"] == 4


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_out_of_memory_in_a_replay_can_be_tried_again(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Fails(when=3), Block(), Block()]), inputs()
    plain = step(model, lambda: model(x))  # call 1; the forward below is call 2, its replay call 3
    with lowtide.attach(model, interval=interval):
        model.zero_grad()
        loss = model(x).square().sum()
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["torch", "torch-ffn", "torch-selective"])
def test_an_error_inside_a_block_leaves_nothing_of_its_step(backend: str) -> None:
    """In the first step under a handle too, whose bytes are counted."""
    row = families.find("wan21_1_3b")
    model: Any = build_model(row, "tiny").train()
    given, made = build_inputs(row.tiny, torch.float32), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: made.append(StorageWeakRef(output.untyped_storage())))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    with lowtide.attach(model, backend=backend):
        for _ in range(2):
            hook = model.blocks[-1].ffn.net[2].register_forward_pre_hook(fail)
            with pytest.raises(torch.OutOfMemoryError):
                model(**given)
            hook.remove()
            gc.collect()
            assert made and all(storage.expired() for storage in made)


def test_base_exception_in_a_block_is_not_swallowed() -> None:
    class Interrupted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Chain([Block(), Interrupted()])
    with lowtide.attach(model, interval=2), pytest.raises(KeyboardInterrupt):
        model(inputs())


def test_second_attach_is_refused_and_leaves_the_first_working() -> None:
    model, x = chain(), inputs()
    with lowtide.attach(model) as handle:
        with pytest.raises(ConfigError, match="attached already"):
            lowtide.attach(model, interval=2)
        step(model, lambda: model(x))
        assert handle.receipt().totals["recompute_calls"] == 4
    assert type(model.blocks[0]) is Block
