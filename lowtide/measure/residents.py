"""What lies on the device throughout a step, whatever becomes of activations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.runtime.flatten import tensors_of

_RESERVED_SHARE = 0.02
"""What the allocator reserves beyond what tensors take, as a share of what is there throughout."""
_WORKSPACE_BYTES = 72 * 2**20
"""cuBLAS, once for the forward's thread and once for backward's."""


@dataclass(frozen=True)
class Residents:
    """Bytes. weights: parameters and buffers. states: of the optimizer. workspace: of libraries. reserved: what the
    allocator takes beyond what tensors need, a forecast: budgets bound it, measured peaks of allocation are without."""

    weights_bytes: int
    gradients_bytes: int
    states_bytes: int
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
    model: nn.Module, inputs: Mapping[str, Any], states_per_weight: int = 2, trained_bytes: int | None = None
) -> Residents:
    """Of a model as it is trained: its trainable weights have a gradient and ``states_per_weight`` optimizer states
    (AdamW: 2), all in one precision.

    trained_bytes: of that precision, a weight; None: as the model has them. Under autocast a model that is traced in
    bfloat16 is trained in float32: 4. The model may be on the meta device.
    """
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    trained = sum(weight.numel() * (trained_bytes or weight.element_size()) for weight in trainable)
    weights = _bytes_of([*frozen, *model.buffers()]) + trained
    states, given = trained * states_per_weight, _bytes_of(list(tensors_of(inputs)))
    reserved = int((weights + trained + states + given) * _RESERVED_SHARE)
    return Residents(weights, trained, states, given, _WORKSPACE_BYTES, reserved)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
