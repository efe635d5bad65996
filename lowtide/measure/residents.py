"""What lies on the device throughout a step, whatever becomes of activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack

ADAMW, ADAMW_FUSED, ADAMW_8BIT = "adamw", "adamw-fused", "adamw-8bit"
STATE_BYTES: Mapping[str, float] = {
    ADAMW: 8,
    ADAMW_FUSED: 8,
    ADAMW_8BIT: 2,
    "lion": 4,
    "sgd-momentum": 4,
    "adafactor": 0,
    "sgd": 0,
}
"""What an optimizer keeps for a weight that is trained in float32. Adafactor keeps a row and a column of a matrix: next
to nothing (without momentum; Shazeer and Stern, arXiv:1804.04235). 8-bit: Dettmers et al., arXiv:2110.02861, the same
in any precision."""
FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
_RESERVED_SHARE = 0.02
"""What the allocator reserves beyond what tensors take, as a share of what is there throughout."""
_WORKSPACE_BYTES = 72 * 2**20
"""cuBLAS, once for the forward's thread and once for backward's."""


@dataclass(frozen=True)
class Residents:
    """Bytes. weights: parameters and buffers. states: of the optimizer. ema: a mean of the trained weights over steps.
    workspace: of libraries. reserved: what the allocator takes beyond what tensors need, a forecast: budgets bound it,
    measured peaks of allocation are without."""

    weights_bytes: int
    gradients_bytes: int
    states_bytes: int
    ema_bytes: int
    inputs_bytes: int
    workspace_bytes: int
    reserved_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes

    @property
    def total_bytes(self) -> int:
        return sum(vars(self).values())


def residents(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    trained_bytes: int | None = None,
    state_bytes: float | None = None,
    ema: bool = False,
) -> Residents:
    """Of a model as it is trained: its trainable weights have a gradient, and states of the optimizer.

    trained_bytes: of the precision of both, a weight; None: as the model has them. Under autocast a model that is
    traced in bfloat16 is trained in float32: 4. state_bytes: for each trained weight (STATE_BYTES); None: two in its
    precision, as AdamW has. ema: whether a mean of the trained weights is on the device, too. The model may be on the
    meta device.
    """
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    trained = sum(weight.numel() * (trained_bytes or weight.element_size()) for weight in trainable)
    weights = _bytes_of([*frozen, *model.buffers()]) + trained
    states = 2 * trained if state_bytes is None else int(state_bytes * sum(weight.numel() for weight in trainable))
    mean, given = trained * ema, _bytes_of(list(tensors_of(inputs)))
    reserved = int((weights + trained + states + mean + given) * _RESERVED_SHARE)
    return Residents(weights, trained, states, mean, given, _WORKSPACE_BYTES, reserved)


def state_bytes(optimizer: str, trained_bytes: int) -> float:
    """What an optimizer (of STATE_BYTES) keeps for a weight of so many bytes: of its precision, unless of 8 bits."""
    return STATE_BYTES[optimizer] * (1 if optimizer == ADAMW_8BIT else trained_bytes / FLOAT32_BYTES)


def update_bytes(optimizer: str, trained_bytes: int) -> int:
    """What an update takes for a weight of so many bytes, for a moment: torch's AdamW on an accelerator, unless it is
    fused, makes as much as the weights take (``foreach`` in its documentation)."""
    return trained_bytes if optimizer == ADAMW else 0


def block_gradients(
    model: nn.Module, stacks: Sequence[ResolvedStack], kinds: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Bytes of the gradients that the backward of one block makes, by kind; the least of its blocks.

    kinds: of every block, by stack (``StepCosts.stacks``). What is used outside of the blocks, too, counts for none,
    and what several blocks use for the last of them.
    """
    within = {id(module) for stack in stacks for _, block in stack.blocks for module in block.modules()}
    seen = {
        id(weight)
        for module in model.modules()
        if id(module) not in within
        for weight in module.parameters(recurse=False)
    }
    found: dict[str, list[int]] = {}
    for stack in reversed(stacks):
        for (_, block), kind in reversed(list(zip(stack.blocks, kinds[stack.name], strict=True))):
            own = [weight for weight in block.parameters() if weight.requires_grad and id(weight) not in seen]
            seen |= {id(weight) for weight in own}
            found.setdefault(kind, []).append(sum(weight.nbytes for weight in own))
    return {kind: min(sizes) for kind, sizes in found.items()}


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
