"""Offload through ``lowtide.attach``: what is refused, and that a schedule of one's own runs as written."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.attaching import attach
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.measure.build import build_model, open_target
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, run_step
from lowtide.plan.schedule import MOVES, Schedule, mixed
from lowtide.runtime.resolve import resolve
from lowtide.testing import cpu_offload

MOVING = [
    {"backend": "unsloth"},
    {"backend": "unsloth-ffn"},
    {"backend": "unsloth-selective"},
    {"backend": None, "offload_attention": True},
    {"backend": "torch", "offload_attention": True},
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_model(families.find("sd3_medium"), "tiny")


@pytest.fixture(autouse=True)
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    classes = [type(module) for module in model.modules()]
    yield
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to offload from")
@pytest.mark.parametrize("options", MOVING, ids=str)
def test_no_accelerator_is_an_error(model: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="offload needs an accelerator"):
        attach(model, **options)


@pytest.mark.parametrize("key", ["wan21_1_3b", "sd3_medium", "flux1"])
def test_with_little_ahead_selective_blocks_wait_for_no_copy_but_the_first(key: str) -> None:
    row = families.find(key)
    model = build_model(row, "tiny")
    inputs, stacks = build_inputs(row.tiny, torch.float32), resolve(model, row.stacks)
    plain = run_step(model, inputs)
    blocks = {stack.name: mixed(["selective+attention+boundary"] * len(stack.blocks)) for stack in stacks}
    with cpu_offload():
        with attach(model, schedule=Schedule(blocks), offload_min_bytes=1) as handle:
            run_step(model, inputs)
            usual = handle.receipt().copies
        ahead_bytes = 2 * usual.d2h_bytes // sum(len(stack.blocks) for stack in stacks) // 3
        narrow = Schedule(blocks, prefetch_bytes=ahead_bytes)
        with attach(model, schedule=narrow, offload_min_bytes=1) as handle:
            found = run_step(model, inputs)
            copies = handle.receipt().copies
    assert copies.prefetch_misses <= 1
    assert copies.h2d_bytes == copies.d2h_bytes == usual.d2h_bytes > 0
    assert not compare(plain, found)


@pytest.mark.parametrize("options", MOVING, ids=str)
def test_settings_are_those_of_the_controls(model: nn.Module, options: dict[str, Any]) -> None:
    with cpu_offload(), attach(model, offload_pin_memory_max_buckets=3, offload_min_bytes=8, **options) as handle:
        assert handle.config == CheckpointConfig.for_attach(
            **options, offload_pin_memory_max_buckets=3, offload_min_bytes=8
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_attention": "maybe"}, "offload_attention: 'maybe' is not allowed"),
        ({"offload_pin_memory_max_buckets": -1}, "offload_pin_memory_max_buckets: -1 is not allowed"),
        ({"offload_min_bytes": -1}, "offload_min_bytes: -1 is not allowed"),
        ({"backend": "unsloth_ffn"}, "Did you mean 'unsloth-ffn'?"),
        ({"backend": "automatic"}, "allowed: torch, torch-ffn, unsloth"),
        ({"backend": "auto", "interval": 2}, "auto chooses for each block by itself: leave interval out"),
        ({"vram_budget": "16GiB"}, "vram_budget bounds what backend = auto chooses"),
        ({"offload_atention": True}, "unknown key 'offload_atention'. Did you mean 'offload_attention'?"),
        ({"backend": None, "offload_attention": True, "interval": 2}, "interval = 2 needs a backend"),
        ({"schedule": Schedule({}), "offload_attention": True}, "leave offload_attention out"),
        ({"schedule": Schedule({}), "backend": "torch"}, "leave backend out"),
        ({"schedule": Schedule({}), "backend": "torch-ffn", "interval": 2}, "leave backend, interval out"),
        ({"schedule": Schedule({}), "segment_stride": 2}, "leave segment_stride out"),
        ({"schedule": Schedule({}), "vram_budget": "16GiB"}, "leave vram_budget out"),
        ({"gradient_checkpointing": True}, "attach() has no 'gradient_checkpointing'"),
        ({"gradient_checkpointing": False}, "backend=None is the spelling"),
        ({"gradient_checkpointing_interval": 2}, "attach() takes 'interval', not 'gradient_checkpointing_interval'"),
        ({"gradient_checkpointing_intervall": 2}, "unknown key 'intervall'. Did you mean 'interval'?"),
    ],
    ids=str,
)
def test_a_mistake_is_named(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with cpu_offload(), pytest.raises(ConfigError) as caught:
        attach(model, **options)
    assert message in str(caught.value)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)


@pytest.mark.parametrize("options", [{"backend": "torch-selective"}, {"offload_attention": True}], ids=str)
def test_a_model_without_softmax_attention_is_named(options: dict[str, Any]) -> None:
    with cpu_offload(), pytest.raises(UnsupportedError, match=r"Convolutions.*it can run: torch, unsloth\."):
        attach(Convolutions(), **options)


WORDS = [
    "kept",
    "whole+boundary",
    "ffn+boundary+attention",
    "selective+attention",
    "kept+attention",
    "ffn+saved",
    "selective+boundary",
    "kept+saved",
]


def test_a_schedule_of_one_s_own_runs_as_written() -> None:
    target = open_target("sd3_medium", "tiny")
    inputs = target.inputs(torch.float32, 0, None, torch.device("cpu"))
    plain = run_step(target.model, inputs)
    schedule = Schedule({"transformer_blocks": mixed(WORDS)})
    with cpu_offload(), attach(target.model, schedule=schedule, offload_min_bytes=0) as handle:
        assert not compare(plain, run_step(target.model, inputs))
        receipt = handle.receipt()
    ran = [block.treatment for block in receipt.blocks]
    planned = [word.partition("+")[0] + ("+offload" if "+" in word else "") for word in WORDS]
    assert ran == [*planned[:-1], "kept"], "what runs last stays"
    assert [block.cpu_bytes > 0 for block in receipt.blocks] == ["+offload" in treatment for treatment in ran]
    # Block 0 keeps one small storage, the conditioning, that later blocks move too: it counts as kept.
    conditioning_bytes = inputs["pooled_projections"].shape[0] * target.model.inner_dim * 4
    assert receipt.totals["d2h_bytes"] - receipt.totals["cpu_bytes"] in (0, conditioning_bytes)
    assert [block.recompute_calls for block in receipt.blocks] == [int(not word.startswith("kept")) for word in WORDS]


@pytest.mark.parametrize("treatment", MOVES)
def test_what_a_treatment_cannot_move_is_refused(treatment: str) -> None:
    for what in {"boundary", "attention", "saved"} - MOVES[treatment]:
        with pytest.raises(ValueError, match=f"'{what}' in '{treatment}.* cannot wait in CPU memory; allowed"):
            mixed([f"{treatment}+{what}"])
