"""One training step, and whether two of them gave the same: the check behind `lowtide verify`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.controls import CheckpointConfig
from lowtide.handle import attach_as
from lowtide.measure.build import Target
from lowtide.plan.schedule import Schedule
from lowtide.runtime.flatten import tensors_of

_LOSS_SEED = 7


@dataclass(frozen=True)
class StepResult:
    """What one forward and backward gave, copied out of the graph.

    gradients: by parameter name; None where a parameter got none.
    """

    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in two steps; max_abs is None where only one of them has it, or shapes differ."""

    tensor: str
    what: str
    max_abs: float | None = None

    def __str__(self) -> str:
        return f"{self.tensor}: {self.what}" + ("" if self.max_abs is None else f" by up to {self.max_abs:.3g}")


@dataclass(frozen=True)
class Report:
    """A plain step beside one with checkpointing.

    differences: none means bit-identical outputs, loss and gradients. gradients: how many parameters got one.
    receipt: what really ran, as ``Receipt.as_dict`` gives it.
    """

    label: str
    options: dict[str, Any]
    loss: float
    gradients: int
    differences: tuple[Difference, ...]
    receipt: dict[str, Any]

    @property
    def same(self) -> bool:
        return not self.differences


def run_step(
    model: nn.Module, inputs: Mapping[str, Any], seed: int = 0, after_forward: Callable[[], None] | None = None
) -> StepResult:
    """Forward, ``after_forward``, ``loss_of``, backward, from this random seed. Leaves its gradients in the model."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = model(**fresh(inputs))
    if after_forward is not None:
        after_forward()
    loss = loss_of(outputs)
    loss.backward()
    gradients = {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}
    return StepResult(tuple(tensor.detach().clone() for tensor in tensors_of(outputs)), loss.detach(), gradients)


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar that gives every element of every output its own random weight, so that no error cancels."""
    generator = torch.Generator().manual_seed(_LOSS_SEED)
    terms = [_weighted(tensor, generator) for tensor in tensors_of(outputs) if tensor.is_floating_point()]
    return torch.stack(terms).sum()


def fresh(inputs: Any) -> Any:
    """A copy of a forward's arguments, tensors cloned: some models write into theirs."""
    if isinstance(inputs, torch.Tensor):
        return inputs.clone()
    if isinstance(inputs, Mapping):
        return {name: fresh(value) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(fresh(value) for value in inputs)
    return inputs


def compare(a: StepResult, b: StepResult) -> list[Difference]:
    """Every tensor that is not bit-identical in both steps."""
    left, right = _named(a), _named(b)
    pairs = [(name, left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])]
    return [difference for pair in pairs if (difference := _difference(*pair)) is not None]


def verify(
    target: Target,
    *,
    seed: int = 0,
    over: Mapping[str, int] | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Report:
    """A plain step and one with ``lowtide.attach(model, **options)``, compared bit by bit, on the model's device.

    schedule: instead of what options say of blocks. over: other sizes for the inputs (B, H, W, T …). The model is left
    detached, without gradients.
    Raises ConfigError for wrong options, and for a model whose inputs no family describes.
    """
    model = target.model
    parameter = next(model.parameters())
    inputs = target.inputs(parameter.dtype, seed, over, parameter.device)
    model.train(target.family is None or target.family.train_mode)
    plain = run_step(model, inputs, seed)
    if schedule is not None:
        options = {**options, "backend": None}
    config = CheckpointConfig.for_attach(**{"backend": "torch", **options})
    with attach_as(model, config, schedule, target.family.key if target.family else None) as handle:
        checkpointed = run_step(model, inputs, seed)
        receipt = handle.receipt().as_dict()
    model.zero_grad(set_to_none=True)
    found = sum(gradient is not None for gradient in plain.gradients.values())
    return Report(
        label=target.label,
        options=options,
        loss=float(plain.loss),
        gradients=found,
        differences=tuple(compare(plain, checkpointed)),
        receipt=receipt,
    )


def _weighted(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
    return (tensor.float() * weights).sum() / math.sqrt(tensor.numel())


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _named(step: StepResult) -> dict[str, torch.Tensor | None]:
    outputs = {f"output {index}": tensor for index, tensor in enumerate(step.outputs)}
    gradients = {f"gradient of {name}": tensor for name, tensor in step.gradients.items()}
    return {"loss": step.loss, **outputs, **gradients}


def _difference(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> Difference | None:
    if a is None or b is None:
        return None if a is b else Difference(name, f"only the {'second' if a is None else 'first'} step has it")
    if a.dtype != b.dtype or a.shape != b.shape:
        return Difference(name, f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
    if torch.equal(a, b):
        return None
    return Difference(name, "differs", float((a - b).abs().max()))
