"""What may not leave the device: weights, told by the model or by the tensor alone, and what has no plain bytes."""

from collections.abc import Set
from typing import Any

import torch
from torch import nn

_STRIDED = torch.strided
_PLAIN = (torch.Tensor, nn.Parameter)


def weight_keys(model: nn.Module, without: Set[int] = frozenset()) -> set[int]:
    """Storages of a model's parameters and buffers. without: ids of modules whose own are left out."""
    return {
        tensor.untyped_storage()._cdata
        for state in _states_of(model, without)
        for tensors in (state["_parameters"], state["_buffers"])
        if tensors
        for tensor in tensors.values()
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED
    }


def _states_of(model: nn.Module, without: Set[int]) -> list[dict[str, Any]]:
    """``__dict__`` of each of its modules; ``model.modules()`` takes three times as long."""
    states, level, seen = [], [model.__dict__], {id(model), *without}
    while level:
        states += level
        level = [
            module.__dict__
            for state in level
            if state["_modules"]
            for module in state["_modules"].values()
            if module is not None and id(module) not in seen and not seen.add(id(module))
        ]
    return states


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
