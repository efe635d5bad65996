"""What a cell runs: a model with random weights, its inputs, what is trained of it, and one step.

Time and memory do not depend on the values of weights, as long as these are random and finite: weights are drawn in
place, in the precision that they are used in, so that a model of n bytes takes n bytes to build.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from lowtide import families
from lowtide.bench.describe import synthetic_shape
from lowtide.bench.precision import quantise
from lowtide.bench.record import Condition
from lowtide.bench.synthetic import HEADS, WIDTH, Synthetic
from lowtide.errors import ConfigError
from lowtide.families import Family
from lowtide.measure.adapter import add_lora
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import fresh
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack, resolve

LARGEST_WHOLE = 10_000_000_000
"""Parameters above which a sweep cuts a model, unless told otherwise."""
FEWEST_BLOCKS = 4
"""Of each stack that is cut."""
DEFAULT_RANK = 16
LEARNING_RATE = 1e-5
_STD = 0.02
_TINY = (6, 32, 2, 16)
"""Blocks, width, heads and tokens of a synthetic work for a CPU."""


@dataclass(frozen=True)
class Task:
    """A model and one step of it.

    trained: what gets a gradient: the adapter's weights, all of the model's, or the input of a frozen one.
    optimizer: updates them; None where the model is frozen.
    """

    model: nn.Module
    stacks: list[ResolvedStack]
    forward: Callable[[], Any]
    trained: list[torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    parameters: int

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for stack in self.stacks for _, block in stack.blocks]

    def step(self) -> None:
        """Forward, backward from fixed gradients of the outputs (no loss is part of it), and the update."""
        outputs = [tensor for tensor in tensors_of(self.forward()) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        if self.optimizer is not None:
            self.optimizer.step()
        for tensor in self.trained:
            tensor.grad = None


def build(condition: Condition, device: str) -> Task:
    """The task of a cell. Raises ConfigError for a work that is unknown."""
    torch.manual_seed(0)
    return _synthetic(condition, device) if condition.kind == "synthetic" else _family(condition, device)


def depth_of(family: Family, most_parameters: int = LARGEST_WHOLE) -> dict[str, int]:
    """Blocks of each stack so that the model has about ``most_parameters`` at most; empty where it has anyway.

    All stacks keep the same share of their blocks, and FEWEST_BLOCKS each if they had as many.
    """
    if family.parameters <= most_parameters:
        return {}
    model = build_model(family, "real", device="meta")
    share = most_parameters / family.parameters
    depths = {stack.name: len(stack.blocks) for stack in resolve(model, family.stacks)}
    kept = {name: max(min(depth, FEWEST_BLOCKS), int(depth * share)) for name, depth in depths.items()}
    return {name: count for name, count in kept.items() if count < depths[name]}


def cut(model: nn.Module, stacks: list[ResolvedStack], depth: Mapping[str, int]) -> None:
    """Leave the first blocks of each stack that ``depth`` names, in place.

    Raises ConfigError for a stack that is no list of modules that the model runs through.
    """
    for name, count in depth.items():
        stack = next((stack for stack in stacks if stack.name == name), None)
        if stack is None:
            raise ConfigError(f"no stack {name!r} to cut; there are: {', '.join(stack.name for stack in stacks)}")
        parent = model.get_submodule(stack.blocks[0][0].rpartition(".")[0])
        if not isinstance(parent, nn.ModuleList) or len(parent) != len(stack.blocks):
            raise ConfigError(f"stack {name!r} is no list of blocks, so it cannot be cut")
        del parent[count:]


def _synthetic(condition: Condition, device: str) -> Task:
    shape = synthetic_shape(condition.work)
    if shape is None:
        raise ConfigError(f"no synthetic work {condition.work!r}; expected blocks x tokens, as in 16x4096")
    blocks, width, heads, tokens = (shape[0], WIDTH, HEADS, shape[1]) if condition.size == "real" else _TINY
    with torch.device(device):
        model = Synthetic(blocks, width, heads).to(torch.bfloat16)
        x = torch.randn(1, tokens, width, dtype=torch.bfloat16)
    return _task(condition, model, resolve(model, None), lambda: model(x), x)


def _family(condition: Condition, device: str) -> Task:
    if condition.adapter == "frozen":
        raise ConfigError("a family is measured with a LoRA or with all weights trained; frozen is for synthetic works")
    row = families.find(condition.work)
    model, stacks = _with_random_weights(row, condition, device)
    settings = row.tiny if condition.size == "tiny" else row.real
    inputs = build_inputs(settings, torch.bfloat16, over=condition.sizes, device=device)
    return _task(condition, model, stacks, lambda: model(**fresh(inputs)), None)


def _with_random_weights(row: Family, condition: Condition, device: str) -> tuple[nn.Module, list[ResolvedStack]]:
    """Buffers are made as the class makes them; weights take memory only once, where and as they are used."""
    with init_empty_weights(include_buffers=False):
        model = build_model(row, condition.size, dtype=torch.bfloat16)
    stacks = resolve(model, row.stacks)
    cut(model, stacks, condition.depth)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_drawn(name, parameter, device)))
    return model.to(device), resolve(model, row.stacks)


def _drawn(name: str, parameter: nn.Parameter, device: str) -> torch.Tensor:
    """Matrices from N(0, 0.02), biases and other vectors 0, scales of norms 1."""
    drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if parameter.dim() > 1:
        return drawn.normal_(std=_STD)
    return drawn.fill_(1.0 if name == "weight" else 0.0)


def _task(
    condition: Condition,
    model: nn.Module,
    stacks: list[ResolvedStack],
    forward: Callable[[], Any],
    leaf: torch.Tensor | None,
) -> Task:
    """leaf: the input that gets a gradient where the model is frozen."""
    count = sum(parameter.numel() for parameter in model.parameters())
    model.requires_grad_(condition.adapter == "full")
    quantise(model, condition.precision)
    if condition.adapter == "frozen" and leaf is not None:
        return Task(model, stacks, forward, [leaf.requires_grad_()], None, count)
    if condition.adapter == "lora":
        add_lora(model, stacks, condition.rank or DEFAULT_RANK)
    trained: list[torch.Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    return Task(model, stacks, forward, trained, torch.optim.AdamW(trained, lr=LEARNING_RATE), count)
