"""What a segment must survive: every shape of call, of a block and of a stack. Each test counts what was recomputed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from tests.runtime.awkward import INTERVALS, PopsSkips, StructuredChain, UsesAll
from tests.runtime.toys import Block, Chain, assert_same_as_plain, chain, inputs


@pytest.mark.parametrize("setting", INTERVALS)
def test_structured_arguments_and_outputs(setting: dict[str, int]) -> None:
    model, x = StructuredChain(5), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), **setting)
    treated = [block for block in receipt.blocks if block.treatment == "whole"]
    assert all(block.recompute_calls == 1 for block in treated)
    assert not receipt.fallbacks


@pytest.mark.parametrize("setting", INTERVALS)
def test_block_returns_its_input_and_a_view_of_it(setting: dict[str, int]) -> None:
    model, x = UsesAll(), inputs().requires_grad_()
    receipt = assert_same_as_plain(model, lambda: model(x), **setting)
    assert receipt.totals["recompute_calls"] > 0


@pytest.mark.parametrize("setting", INTERVALS[:3])
def test_list_mutated_by_a_block(setting: dict[str, int]) -> None:
    model, x = PopsSkips(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4, **setting)


def test_skip_tensor_between_blocks_is_carried_by_the_segment() -> None:
    kept: list[torch.Tensor] = []

    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            kept[:] = [x]
        return x + kept[0] if index == 2 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(6)], glue), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=6, interval=3)
    assert receipt.fallbacks == ()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=6, interval=4)
    assert [note.subject for note in receipt.fallbacks] == ["blocks.3"]
    assert "AddBackward0" in receipt.fallbacks[0].reason


def test_hidden_state_capture_needs_no_fallback() -> None:
    captured: list[torch.Tensor] = []

    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        captured.append(x)
        return x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(4)], glue), inputs()

    def run() -> torch.Tensor:
        captured.clear()
        return model(x) + sum(hidden.sin() for hidden in captured)

    receipt = assert_same_as_plain(model, run, recomputed=4, interval=2)
    assert receipt.fallbacks == ()


def test_inplace_glue_ends_the_segment() -> None:
    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if index == 0 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(4)], glue), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=4, interval=2)
    assert [note.subject for note in receipt.fallbacks] == ["blocks.1"]


def test_frozen_prefix_is_not_recomputed() -> None:
    model, x = chain(4), inputs()
    model.blocks[:3].requires_grad_(False)
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=1)
    assert [block.reason for block in receipt.blocks[:3]] == ["nothing in it needed a gradient"] * 3
    assert receipt.blocks[0].kept_bytes == 0


@pytest.mark.parametrize("setting", INTERVALS)
def test_lora_only_in_a_late_layer_of_each_block(setting: dict[str, int]) -> None:
    model, x = chain(5), inputs()
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    assert_same_as_plain(model, lambda: model(x), **setting)


def test_module_called_twice_and_shared_modules() -> None:
    torch.manual_seed(0)
    shared, other, third = Block(), Block(), Block()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([shared, other, shared, third])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(block(x))
            return x

    model, x = Twice(), inputs()
    for setting in ({}, {"interval": 2}, {"interval": 3}):
        assert_same_as_plain(model, lambda: model(x), recomputed=8, **setting)


def test_a_block_called_again_and_again_does_not_join_one_segment_for_ever() -> None:
    model, x = chain(2), inputs()

    def run() -> torch.Tensor:
        out = x
        for _ in range(5):
            out = model.blocks[0](out)
        return out

    receipt = assert_same_as_plain(model, run, recomputed=5, interval=2)
    assert receipt.blocks[1].reason == "not called"


def test_opaque_argument_keeps_the_block_and_says_so() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

    class Caching(Block):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
            cache.seen.append(x)
            return super().forward(sum(cache.seen))  # type: ignore[arg-type]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Caching() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            for block in self.blocks:
                x = block(x, cache)
            return x

    model, x = Model(), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=0, interval=2)
    assert {block.treatment for block in receipt.blocks} == {"kept"}
    assert all("Cache" in note.reason for note in receipt.fallbacks)
    assert len(receipt.fallbacks) == 3


def test_saved_tensors_read_inside_a_block() -> None:
    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                out = super().forward(x)
                (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            return out + grad

    torch.manual_seed(0)
    model, x = Chain([Inner() for _ in range(3)]), inputs().requires_grad_()
    for setting in INTERVALS[:3]:
        receipt = assert_same_as_plain(model, lambda: model(x), **setting)
        assert receipt.totals["recompute_calls"] >= 3


@pytest.mark.parametrize("region", [lowtide.checkpoint, torch_checkpoint])
def test_a_segment_does_not_span_two_other_checkpoints(region: Any) -> None:
    """Each is recomputed alone; a segment over both would hand the second one the first one's tensors."""

    class Scaled(Block):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            options = {"use_reentrant": False}
            for block, scale in zip(self.blocks, scales, strict=True):
                x = region(block, x, scale, **options)
            return x

    model, x, scales = Model(), inputs(), torch.randn(4, 6, 16)
    assert_same_as_plain(model, lambda: model(x, scales), interval=2)


def test_storage_exchanged_by_glue_between_blocks() -> None:
    class Adds(Block):
        def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + extra)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Adds() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            extra = torch.randn(6, 16)
            for block in self.blocks:
                x = block(x, extra)
                extra.data = torch.randn(6, 16)
            return x

    model, x = Model(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4, interval=2)


def test_sparse_arguments() -> None:
    class Mixes(Block):
        def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.sparse.mm(matrix, x).sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Mixes() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            matrix = torch.eye(6).to_sparse()
            for block in self.blocks:
                x = block(x, matrix)
            return x

    model, x = Model(), inputs()
    for setting in INTERVALS:
        receipt = assert_same_as_plain(model, lambda: model(x), **setting)
        assert receipt.totals["recompute_calls"] > 0
