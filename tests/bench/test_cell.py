"""Cells, run here on the CPU in tiny sizes: figures, receipts and every state."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.bench import cell as cells
from lowtide.bench.cell import Effort, run_cell
from lowtide.bench.modes import MODES
from lowtide.bench.record import Condition, Record
from lowtide.bench.sweep import family_conditions
from lowtide.bench.works import build, cut, depth_of
from lowtide.measure.build import build_model
from lowtide.measure.cover import uncovered
from lowtide.runtime.resolve import resolve
from tests.contract.conftest import EVERY_MODE

QUICK = Effort(warm_up=1, steps=2)
SYNTHETIC = Condition("synthetic", "16x4096", "none", size="tiny")


def run(condition: Condition) -> Record:
    return run_cell(condition, QUICK, "cpu", {"card": None})


def tiny(key: str, mode: str) -> Condition:
    return next(family_conditions([key], [mode], {}, budgets=(2**34,), size="tiny"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_figures_or_says_why_not(mode: str) -> None:
    record = run(tiny("flux1", mode))
    assert record.state == "ok", record.reason
    assert record.figures is not None
    assert len(record.figures.step_times_s) == 2
    assert record.figures.step_s > 0 < record.figures.peak_allocated_bytes
    attached = mode not in ("none", "torch-checkpoint", "diffusers")
    assert (record.receipt is not None) == attached
    assert record.inert == (["offload_attention: attention is recomputed"] if mode == "layer-offload" else [])


def test_the_receipt_counts_treatments() -> None:
    record = run(tiny("flux1", "seg2-stride4"))
    depth = len(build(tiny("flux1", "none"), "cpu").blocks)
    assert record.receipt is not None
    assert sum(record.receipt["blocks"].values()) == depth
    assert set(record.receipt["blocks"]) == {"whole", "kept"}


@pytest.mark.parametrize("adapter", ["frozen", "lora", "full"])
def test_what_is_trained(adapter: str) -> None:
    task = build(replace(SYNTHETIC, adapter=adapter), "cpu")
    weights = [weight for weight in task.model.parameters() if weight.requires_grad]
    assert {id(weight) for weight in weights} == ({id(t) for t in task.trained} if adapter != "frozen" else set())
    assert (task.optimizer is None) == (adapter == "frozen")
    before = [tensor.detach().clone() for tensor in task.trained]
    task.step()
    changed = [not torch.equal(tensor, old) for tensor, old in zip(task.trained, before, strict=True)]
    assert all(changed) if adapter == "lora" else any(changed) == (adapter == "full")
    assert all(tensor.grad is None for tensor in task.trained)


def test_a_mode_that_a_model_cannot_run_is_unsupported() -> None:
    record = run(replace(SYNTHETIC, mode="diffusers"))
    assert record.state == "unsupported"
    assert record.reason == "diffusers' Synthetic does not support gradient checkpointing"


def test_an_error_is_a_failed_cell() -> None:
    record = run(replace(SYNTHETIC, work="3 blocks"))
    assert record.state == "failed"
    assert record.reason is not None and "no synthetic work '3 blocks'" in record.reason


def test_memory_that_runs_out_is_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(cells, "build", full)
    record = run(SYNTHETIC)
    assert (record.state, record.reason) == ("oom", "CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_stack_that_a_row_misses_is_told_as_inert() -> None:
    row = families.find("flux1")
    model = build_model(row)
    assert list(uncovered(model, resolve(model, row.stacks))) == []
    missing = list(uncovered(model, resolve(model, row.stacks[:1])))
    assert [(kind, len(names)) for kind, names in missing] == [
        ("FluxSingleTransformerBlock", len(model.get_submodule("single_transformer_blocks")._modules))
    ]


LARGE = [row.key for row in families.all_families() if row.parameters > 10e9]


@pytest.mark.parametrize("key", LARGE if EVERY_MODE else LARGE[::2])
def test_a_large_model_is_cut_and_still_runs(key: str) -> None:
    row = families.find(key)
    depth = depth_of(row)
    full = {stack.name: len(stack.blocks) for stack in resolve(build_model(row, "real", device="meta"), row.stacks)}
    assert depth and all(4 <= count < full[name] for name, count in depth.items())
    model = build_model(row)
    stacks = resolve(model, row.stacks)
    cut(model, stacks, {stack.name: max(1, len(stack.blocks) - 1) for stack in stacks if stack.name in depth})
    shorter = resolve(model, row.stacks)
    assert sum(len(stack.blocks) for stack in shorter) < sum(len(stack.blocks) for stack in stacks)
    record = run(replace(tiny(key, "layer"), depth={stack.name: len(stack.blocks) for stack in shorter}))
    assert record.state == "ok", record.reason
    assert record.receipt is not None
    assert sum(record.receipt["blocks"].values()) == sum(len(stack.blocks) for stack in shorter)


def test_real_weights_are_drawn_as_they_are_used() -> None:
    task = build(tiny("wan21_1_3b", "none"), "cpu")
    kept = type(task.model)._keep_in_fp32_modules  # type: ignore[attr-defined]
    for name, weight in task.model.named_parameters():
        assert weight.device.type == "cpu" and torch.isfinite(weight).all()
        assert (weight.dtype == torch.float32) == any(part in kept for part in name.split(".")), name
    assert all(isinstance(module, nn.Module) for module in task.blocks)
