"""What may not leave the device: weights, told by the model or by the tensor alone, and what has no plain bytes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_STRIDED = torch.strided


def weight_keys(model: nn.Module) -> set[int]:
    """Storages of a model's parameters and buffers."""
    return {tensor.untyped_storage()._cdata for tensor in _weights_of(model) if tensor.layout is _STRIDED}


def _weights_of(model: nn.Module) -> Iterable[torch.Tensor]:
    for module in model.modules():
        state = module.__dict__
        for tensor in (*state["_parameters"].values(), *state["_buffers"].values()):
            if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter):
                yield tensor


def is_activation(tensor: torch.Tensor) -> bool:
    """Rule 2: no weight, seen from the tensor alone; and plain bytes."""
    if tensor.is_leaf and tensor.requires_grad:  # whoever wants its gradient holds it
        return False
    base = tensor._base
    if base is not None:
        if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
            return False
        transposed = tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.stride(1) > 1
        if transposed and not tensor.requires_grad:  # a linear layer's weight, dequantised or cast for this call
            return False
    if _casts_a_weight((tensor if base is None else base).grad_fn):
        return False
    return not (tensor._is_zerotensor() or tensor.is_nested or tensor.is_quantized)


def _casts_a_weight(maker: Any) -> bool:
    """Whether autograd's node is autocast's copy of a weight that is trained."""
    if maker is None or maker.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(maker.next_functions[0][0], "variable", None), nn.Parameter)
