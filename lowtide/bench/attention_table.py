"""Attention kernels side by side: seconds a step, peak memory, and how near their gradients come to float32's.

The cosine is a numerical diagnostic: it says how a kernel rounds, and nothing about the quality of pictures.
"""

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.bench.attention import KERNELS, kernels
from lowtide.bench.cell import Effort, in_a_line, run_cell
from lowtide.bench.isolate import Died, isolated
from lowtide.bench.modes import mode
from lowtide.bench.record import Condition, Record
from lowtide.bench.works import build
from lowtide.measure.parity import loss_of
from lowtide.runtime.flatten import flatten_call, rebuild_call

KERNEL_NAMES = ("default", *KERNELS)
REFERENCE = "float32, math kernel"
GRADIENT_MODE = "layer"
"""Gradients are taken with whole blocks recomputed, which changes no gradient and lets the float32 model fit."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel: its cell, and the cosine of its LoRA gradients to the reference's.

    why_no_cosine: None where there is one, and where the cell has no figures either: its record says why.
    """

    record: Record
    cosine: float | None = None
    why_no_cosine: str | None = None

    def as_dict(self) -> dict[str, Any]:
        record = asdict(self.record)
        machine = record.pop("machine")
        return {
            "machine": machine,
            "tool": "attention",
            **record,
            "gradient_cosine": self.cosine,
            "gradient_reference": REFERENCE,
            "why_no_cosine": self.why_no_cosine,
        }


def write_reference(condition: Condition, device: str, path: Path, timeout_s: float) -> str | None:
    """Save the reference's gradients, made in a process of its own. None, or why there are none."""
    exact = replace(condition, attention="math")
    try:
        return isolated(_saved, exact, device, path, device=device, timeout_s=timeout_s)
    except Died as ending:
        return str(ending)


def measure_kernel(
    condition: Condition, effort: Effort, device: str, machine: Mapping[str, Any], reference: Path | None
) -> KernelRow:
    """The row of a kernel, measured in a process of its own. reference: what ``write_reference`` saved."""
    try:
        return isolated(_row, condition, effort, device, machine, reference, device=device, timeout_s=effort.timeout_s)
    except Died as ending:
        return KernelRow(Record(condition, "failed", machine, reason=str(ending)))


def gradients(condition: Condition, device: str, exact: bool = False) -> torch.Tensor:
    """Of all LoRA weights, flattened together, in float32 on the CPU.

    exact: the same model and inputs (the bfloat16 ones, cast) computed in float32. Every element of the outputs has a
    weight of its own in the loss.
    """
    task = build(condition, device)
    if exact:
        _compute_in_float32(task.model)
    with _no_tf32(), kernels(condition.attention), mode(GRADIENT_MODE).enter(task):
        torch.manual_seed(0)
        loss_of(task.forward()).backward()
    found = (weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in task.trained)
    return torch.cat([gradient.detach().float().flatten().cpu() for gradient in found])


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def _row(
    condition: Condition, effort: Effort, device: str, machine: Mapping[str, Any], reference: Path | None
) -> KernelRow:
    record = run_cell(condition, effort, device, machine)
    if record.figures is None or reference is None:
        return KernelRow(record)
    gc.collect()  # the cell's model goes before another one comes
    try:
        return KernelRow(record, cosine(gradients(condition, device), torch.load(reference)))
    except RuntimeError as error:
        return KernelRow(record, why_no_cosine=in_a_line(error))


def _saved(condition: Condition, device: str, path: Path) -> str | None:
    try:
        torch.save(gradients(condition, device, exact=True), path)
    except RuntimeError as error:
        return in_a_line(error)
    return None


def _compute_in_float32(model: nn.Module) -> None:
    """Weights, buffers and, as the model is called, its inputs."""

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, leaves = flatten_call(args, kwargs)
        exact = [leaf.float() if leaf.dtype == torch.bfloat16 else leaf for leaf in leaves]
        again, by_name = rebuild_call(arguments, exact)
        return tuple(again), by_name

    model.float()
    model.register_forward_pre_hook(cast, with_kwargs=True)


def _no_tf32() -> Any:
    """cuDNN's convolutions round float32 to TF32 unless told otherwise; torch's products do not."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
