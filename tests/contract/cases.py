"""Tiny models of every row, with full or LoRA training, and the plain step that everything is compared with."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lowtide import families
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import StepResult, fresh, run_step
from lowtide.plan.held import HeldTrace
from lowtide.runtime.resolve import ResolvedStack, resolve
from tests.contract.observed import Observer

SEED = 11


@dataclass
class Case:
    """One freshly built tiny model, its inputs, and the step that it makes without lowtide."""

    row: Family
    model: nn.Module
    inputs: dict[str, Any]
    plain: StepResult
    stacks: list[ResolvedStack] = field(init=False)

    def __post_init__(self) -> None:
        self.stacks = resolve(self.model, self.row.stacks)

    def step(self, model: nn.Module | None = None) -> StepResult:
        return run_step(model or self.model, self.inputs, SEED)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [block for stack in self.stacks for block in stack.blocks]


def make_case(row: Family, training: str = "full", variant: str | None = None) -> Case:
    """training: "full" or "lora". variant: one of the row's."""
    return Case(row, _trainable(row, training), _inputs(row, variant), plain_step(row.key, training, variant)[0])


@functools.lru_cache(maxsize=8)
def plain_step(key: str, training: str, variant: str | None = None) -> tuple[StepResult, Observer, int]:
    """The step without lowtide, what was seen in it, and bytes that the model keeps of its very first forward."""
    row = families.find(key)
    model, inputs = _trainable(row, training), _inputs(row, variant)
    first = first_forward(model, inputs)
    with Observer(model, first) as seen:
        step = run_step(model, inputs, SEED, after_forward=seen.forward_is_over)
    return step, seen, first.left_bytes


def first_forward(model: nn.Module, inputs: dict[str, Any]) -> Observer:
    """What was seen in one forward without gradients."""
    with torch.no_grad(), Observer(model) as seen:
        model(**fresh(inputs))
    return seen


@functools.cache
def trace_of(key: str, training: str) -> HeldTrace:
    """What the plain forward saves."""
    case = make_case(families.find(key), training)
    return trace_held(case.model, case.stacks, case.inputs)


def _inputs(row: Family, variant: str | None) -> dict[str, Any]:
    return build_inputs(row.tiny, variant=row.variants[variant] if variant else None)


def _trainable(row: Family, training: str) -> nn.Module:
    model = build_model(row, "tiny")
    return _with_lora(model, row) if training == "lora" else model


def _with_lora(model: Any, row: Family) -> nn.Module:
    """LoRA on the projections of every softmax attention; adapters start away from zero, so that gradients do too."""
    names = [
        f"{block_name}.{name}"
        for stack in resolve(model, row.stacks)
        for block_name, block in stack.blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(f"{path}." for path in stack.row.attention))
    ]
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if hasattr(model, "add_adapter"):
            model.add_adapter(config)
        else:
            inject_adapter_in_model(config, model)
    return model
