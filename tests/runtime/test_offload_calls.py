"""What offload must survive, with copies that run as late as they may: every shape of call, as in
test_segment_calls.py. Each test sees that something was moved."""

import dataclasses
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ReplayError
from lowtide.measure.parity import compare, run_step
from lowtide.plan.schedule import Schedule, mixed
from tests.integration import models
from tests.runtime.awkward import ChangesArgument, PopsSkips, StructuredChain, UsesAll
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


# ---------------------------------------------------------------------- calls


@settings(ALL)
def test_gradients_and_what_the_receipt_says(setting: dict[str, Any], late: LateLink) -> None:
    model, x = transformers(), inputs()
    # Here attention is plain matrix products, which do not save their result; a selective block holds it, too.
    selective = setting.get("backend") == "unsloth-selective"
    with lowtide.attach(model, backend="torch-selective" if selective else None) as handle:
        step(model, lambda: model(x))
        totals = handle.receipt().totals
        plain_bytes = totals["kept_bytes"] + totals["recomputed_bytes"]
    for block in model.blocks:
        block.calls = 0
    receipt = assert_same_and_moved(model, lambda: model(x), **setting)
    totals, copies = receipt.totals, receipt.copies
    out = sum(sum(sizes) for name, sizes in late.log if name == "copy_out")
    assert out == 3 * copies.d2h_bytes
    assert late.in_bytes == 3 * copies.h2d_bytes
    assert totals["cpu_bytes"] == copies.d2h_bytes
    assert copies.h2d_bytes <= copies.d2h_bytes
    assert totals["kept_bytes"] + totals["cpu_bytes"] + totals["recomputed_bytes"] == pytest.approx(plain_bytes, 0.01)
    assert all((block.cpu_bytes > 0) <= block.treatment.endswith("+offload") for block in receipt.blocks)
    assert any(block.cpu_bytes for block in receipt.blocks)
    counted = [block.calls - 5 for block in model.blocks]  # five steps; what is above are recomputations
    again = [
        3 * b.recompute_calls if b.treatment.split("+")[0] in ("whole", "selective") else 0 for b in receipt.blocks
    ]
    assert counted == again


@settings(PLAIN_BLOCKS)
def test_structured_arguments_and_outputs(setting: dict[str, Any]) -> None:
    model, x = StructuredChain(DEPTH), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_block_returns_its_input_and_a_view_of_it(setting: dict[str, Any]) -> None:
    model, x = UsesAll(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_list_mutated_by_a_block(setting: dict[str, Any]) -> None:
    model, x = PopsSkips(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@dataclasses.dataclass
class Extra:
    text: torch.Tensor
    mask: torch.Tensor | None = None


class TakesViews(Block):
    """Keywords, nested, of which some are views of one storage and some change from call to call."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, extra: Extra, modulation: tuple[torch.Tensor, ...], scale: float
    ) -> torch.Tensor:
        shift, gate = modulation
        mask = 1 if extra.mask is None else extra.mask
        return super().forward(x * scale + extra.text.mean(0) + shift) * gate * mask


class WithViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TakesViews() for _ in range(DEPTH))
        self.modulate = nn.Linear(16, 32 * DEPTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        fused = self.modulate(x).unflatten(-1, (DEPTH, 2, 16))
        for index, block in enumerate(self.blocks):
            mask = None if index % 2 else text[:6].t().contiguous().t()[:, :16].sign()
            pair = (fused[:, index, 0], fused[:, index, 1])
            x = block(x, extra=Extra(text, mask), modulation=pair, scale=0.5)
        return x


@settings(PLAIN_BLOCKS)
@pytest.mark.parametrize("text_from", ["nowhere", "inference mode", "a graph"])
def test_keywords_and_views_of_one_storage(setting: dict[str, Any], text_from: str) -> None:
    model, x, text = WithViews(), inputs(), torch.randn(8, 16)
    if text_from == "inference mode":  # as text encoders may give it
        with torch.inference_mode():
            text = text * 1
    leaf = text.requires_grad_() if text_from == "a graph" else None

    def run() -> torch.Tensor:
        return model(x, text if leaf is None else leaf * 2)

    assert_same_and_moved(model, run, **setting)


@settings(ALL)
def test_frozen_model_with_a_few_trained_weights(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv.bias.requires_grad_(True)
        block.mlp[2].weight.requires_grad_(True)
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(ALL)
def test_autocast(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    assert_same_and_moved(model, run, **setting)


def test_skips_shared_by_blocks_are_copied_once(late: LateLink) -> None:
    class Skips(Block):
        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + skip)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Skips() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skip = x * 2
            for block in self.blocks:
                x = block(x, skip)
            return x

    model, x = Model(), inputs()
    receipt = assert_same_and_moved(model, lambda: model(x), backend="unsloth")
    size = x.nbytes
    assert receipt.copies.d2h_bytes == 4 * size  # the skip, and what three blocks are given; the last one's stays


# ---------------------------------------------------------------------- changed in place


@settings(PLAIN_BLOCKS)
def test_inplace_glue(setting: dict[str, Any]) -> None:
    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if index == 0 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)], glue), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_changed_argument_is_an_error_while_it_may_still_be_on_the_device(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)]), inputs()
    plain, entry = step(model, lambda: model(x)), x * 1
    with attached(model, **setting):
        hidden = model.blocks[0](entry)
        entry.add_(1)
        hidden = model.blocks[2](model.blocks[1](hidden))
        with pytest.raises(ReplayError, match=r"modified by an inplace"):
            hidden.sum().backward()
        del hidden
        assert_equal(plain, step(model, lambda: model(x)))


@pytest.mark.parametrize("interval", [1, 2])
def test_block_that_changes_its_argument_is_an_error_at_forward(interval: int) -> None:
    torch.manual_seed(0)
    model = Chain([Block(), ChangesArgument(), Block(), Block()])
    handle = attached(model, backend="unsloth", interval=interval)
    with pytest.raises(ReplayError, match=r"blocks\.1.*modified by an inplace"):
        model(inputs())
    gc.collect()
    handle.detach()
    assert handle._store is not None and handle._store.pool.total_bytes == 0


# ---------------------------------------------------------------------- real models


REAL: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth in twos": {"backend": "unsloth", "interval": 2},
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "attention": {"backend": None, "offload_attention": True},
    "attention and ffn": {"backend": "torch-ffn", "offload_attention": True},
}
WORDS = ("kept+saved", "ffn+boundary+attention", "whole+boundary", "selective+boundary+attention")


@settings({**REAL, "mixed": {"backend": None}})
@pytest.mark.parametrize("key", ["flux1", "wan21_1_3b"])
def test_diffusers_models(key: str, setting: dict[str, Any], late: LateLink) -> None:
    model, given = models.build(key), models.inputs(key)
    with lowtide.attach(model, backend=None) as handle:
        plain = run_step(model, given)
        depths = {stack.name: len(stack.blocks) for stack in handle.stacks}
    if setting["backend"] is None and not setting.get("offload_attention"):
        words = {name: [WORDS[index % 4] for index in range(depth)] for name, depth in depths.items()}
        setting = {"backend": None, "schedule": Schedule({name: mixed(word) for name, word in words.items()})}
    with attached(model, **setting) as handle:
        for _ in range(2):
            late.log.clear()
            assert [str(difference) for difference in compare(plain, run_step(model, given))] == []
            receipt = handle.receipt()
            totals = receipt.totals
            out = sum(sum(sizes) for name, sizes in late.log if name == "copy_out")
            assert 0 < out == receipt.copies.d2h_bytes == totals["cpu_bytes"]
            assert receipt.copies.h2d_bytes <= receipt.copies.d2h_bytes
            assert receipt.copies.prefetch_misses <= 3
            assert receipt.copies.pool["in_use_bytes"] == 0
        schedule = handle.schedule
    stacks = {name: replace(stack, moves=()) for name, stack in schedule.stacks.items()}
    with lowtide.attach(model, backend=None, schedule=Schedule(stacks)) as handle:
        run_step(model, given)
        on_the_device = handle.receipt().totals
    assert totals["kept_bytes"] + totals["cpu_bytes"] == on_the_device["kept_bytes"]  # moved, and nothing else changed
    assert totals["recomputed_bytes"] == on_the_device["recomputed_bytes"]
