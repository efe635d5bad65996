"""What may not leave the device: weights, told by the model or by the tensor alone, and what has no plain bytes."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_STRIDED = torch.strided
_TENSOR, _PARAMETER = torch.Tensor, nn.Parameter


class WeightKeys:
    """Storages of a model's parameters and buffers, as they are whenever this is asked.

    The walk over all modules takes a host 2 to 10 ms with LoRA, at the begin of a step, when the device has nothing to
    do. So modules are remembered (weakly), and walked over again only where they are no longer the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[Callable[[], nn.Module | None]] = []
        self._children: list[int] = []

    def now(self) -> set[int]:
        states = self._states_known()
        if states is None:
            states = self._walk()
        return _keys_of(states, "_parameters") | _keys_of(states, "_buffers")

    def _states_known(self) -> list[dict[str, Any]] | None:
        """``__dict__`` of all modules of the last walk; None where some are gone, others have come, or there was none.

        An id is that of the same module as long as the one that had it lives, which the weak references tell.
        """
        modules = [known() for known in self._modules]
        if not modules or None in modules:
            return None
        states = [module.__dict__ for module in modules]
        return states if _children_of(states) == self._children else None

    def _walk(self) -> list[dict[str, Any]]:
        model = self._model()
        if model is None:
            return []
        found = list(model.modules())
        states = [module.__dict__ for module in found]
        self._modules, self._children = list(map(weakref.ref, found)), _children_of(states)
        return states


def _keys_of(states: Iterable[dict[str, Any]], kind: str) -> set[int]:
    return {
        tensor.untyped_storage()._cdata
        for state in states
        if state[kind]
        for tensor in state[kind].values()
        if ((of := type(tensor)) is _PARAMETER or of is _TENSOR) and tensor.layout is _STRIDED
    }


def _children_of(states: Iterable[dict[str, Any]]) -> list[int]:
    return [id(child) for state in states if state["_modules"] for child in state["_modules"].values()]


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
