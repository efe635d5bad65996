"""What receipts say of options that a model cannot honour, of the block that runs last, and in one line."""

import warnings
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import lowtide
from lowtide import families
from lowtide.bench.synthetic import Synthetic
from lowtide.controls import CheckpointConfig
from lowtide.families import Family
from lowtide.handle import RUNS_LAST
from lowtide.measure.build import build_model, open_target
from lowtide.measure.inputs import build_inputs
from lowtide.measure.inspection import inspect_target
from lowtide.measure.parity import run_step
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.unit import NO_ATTENTION
from lowtide.testing import cpu_offload
from tests.runtime.toys import Chain

SANA = families.find("sana")


def sana(depth: int) -> nn.Module:
    return diffusers.SanaTransformer2DModel(**{**SANA.tiny.config, "num_layers": depth})


def receipt_of(model: nn.Module, row: Family = SANA, **options: Any) -> Receipt:
    with cpu_offload(), lowtide.attach(model, offload_min_bytes=0, **options) as handle:
        run_step(model, build_inputs(row.tiny))
        return handle.receipt()


@pytest.mark.parametrize(
    ("depth", "options", "warning", "ignored"),
    [
        (1, {"interval": 2}, "interval 2 is wider than the deepest block stack", ["interval"]),
        (1, {"interval": 1, "segment_stride": 2}, "segment_stride is ignored for Sana", ["segment_stride"]),
        (3, {"interval": 3, "segment_stride": 4}, "more than 3 blocks, so there is no gap", ["segment_stride"]),
        (3, {"interval": 4, "segment_stride": 5}, "interval 4 is wider than", ["segment_stride"]),
        (
            3,
            {"backend": "torch-ffn", "interval": 3, "segment_stride": 3},
            "segment_stride is ignored",
            ["segment_stride"],
        ),
        (3, {"interval": 4}, "interval 4 is wider than", []),
    ],
)
def test_what_no_step_can_honour_is_warned_of_once_and_ignored(
    depth: int, options: dict[str, Any], warning: str, ignored: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        receipt = receipt_of(sana(depth), **options)
    assert [warning in str(item.message) for item in caught] == [True]
    assert [note.subject for note in receipt.ignored] == ignored
    assert not {note.subject for note in receipt.inert} & set(ignored)


def test_what_a_model_can_honour_is_not_ignored() -> None:
    receipt = receipt_of(sana(3), interval=2, segment_stride=3)
    assert receipt.ignored == receipt.inert == ()


@pytest.mark.parametrize(
    ("options", "staying"),
    [
        ({"backend": "unsloth"}, [7]),
        ({"backend": "unsloth", "interval": 2}, [6, 7]),
        ({"backend": None, "offload_attention": True}, [7]),
        ({"backend": "unsloth-ffn"}, [7]),
        ({"backend": "torch"}, []),
        ({"backend": "unsloth", "interval": 1, "segment_stride": 2}, []),
    ],
    ids=str,
)
def test_what_runs_last_says_that_it_stays(options: dict[str, Any], staying: list[int]) -> None:
    receipt = receipt_of(build_model(SANA), **options)
    assert [block.index for block in receipt.blocks if block.reason == RUNS_LAST] == staying
    assert all(block.reason is None for block in receipt.blocks if block.index not in staying)


def test_a_last_block_of_which_nothing_would_move_says_nothing() -> None:
    row = families.find("sd15")  # ends with a ResNet, which has no attention
    *_, last = receipt_of(build_model(row), row, backend=None, offload_attention=True).blocks
    assert (last.treatment, last.cpu_bytes) == ("kept", 0)
    assert (last.reason == RUNS_LAST) == (".transformer_blocks." in last.name)


def test_blocks_without_attention_stay_as_they_are_where_attention_moves() -> None:
    row = families.find("sd15")
    *blocks, _ = receipt_of(build_model(row), row, backend=None, offload_attention=True).blocks
    with_attention = [block for block in blocks if ".transformer_blocks." in block.name]
    without = [block for block in blocks if block not in with_attention]
    assert {(block.treatment, block.reason) for block in with_attention} == {("kept+offload", None)}
    assert {(block.treatment, block.reason, block.cpu_bytes) for block in without} == {("kept", NO_ATTENTION, 0)}
    assert len(with_attention) > 10 < len(without)


def test_a_receipt_in_one_line() -> None:
    receipt = receipt_of(build_model(SANA), interval=2, segment_stride=4, offload_attention=True)
    text = repr(receipt)
    assert text.startswith("<Receipt: 8 blocks: 4 whole, 3 kept+offload, 1 kept; 4 recomputations; ")
    assert " kept, " in text and " on CPU, " in text and text.endswith(" recomputed>")
    inert = repr(receipt_of(build_model(SANA), offload_attention=True))
    assert inert.endswith("; inert: offload_attention>")
    assert len(inert) < 200


def test_a_handle_in_one_line() -> None:
    model = Synthetic(4, 32, 2)
    with lowtide.attach(model, backend="torch-ffn") as handle:
        assert repr(handle) == "<Handle: 4 ffn>"
    assert repr(handle) == "<Handle: 4 ffn; detached>"
    with lowtide.attach(model, backend="auto", vram_budget="1GiB") as auto:
        assert repr(auto) == "<AutoHandle: 4 kept; not settled yet>"
    assert repr(auto) == "<AutoHandle: 4 kept; detached>"


@pytest.mark.parametrize("backend", ["torch-ffn", "unsloth-ffn"])
def test_a_backend_that_recomputes_nothing_is_inert(backend: str) -> None:
    """The micro-blocks of SD 1.x are ResNets and transformers in turns: every second one has no feed-forward."""
    row = families.find("sd15")
    receipt = receipt_of(build_model(row), row, backend=backend, interval=2)
    assert {block.treatment for block in receipt.blocks} == {"kept"}
    (note,) = receipt.inert
    assert (note.subject, note.reason) == (
        "backend",
        "no block is recomputed: those that interval and stride choose have no feed-forward",
    )
    planned = inspect_target(open_target("sd15", device="meta"), CheckpointConfig.for_attach(backend, 2))
    assert planned.inert == (note,)


class ByHand(nn.Module):
    """Attention that calls no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.transpose(-1, -2)).softmax(dim=-1) @ v)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), ByHand()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize("backend", ["torch-selective", "unsloth-selective"])
def test_selective_that_keeps_no_kernel_is_inert(backend: str) -> None:
    model = Chain([Attending() for _ in range(4)])
    with cpu_offload(), lowtide.attach(model, backend=backend, offload_min_bytes=1) as handle:
        for _ in range(2):
            model(torch.randn(2, 8, 16)).sum().backward()
            receipt = handle.receipt()
            assert "backend" in {note.subject for note in receipt.inert}
            reason = "no attention kernel's outputs are kept, so whole blocks are recomputed: see fallbacks"
            assert reason in {note.reason for note in receipt.inert}
            assert len(receipt.fallbacks) == 4
    kept = receipt_of(build_model(SANA), backend=backend)
    assert not any("kernel" in note.reason for note in kept.inert)
