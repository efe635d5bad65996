"""A model's shapes without its values, and a step's arguments likewise: what is traced where memory is scarce."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowtide.errors import ConfigError
from lowtide.measure.casting import Casting

_LARGE = 2**22
"""Elements of a floating-point tensor above which its values are not read."""


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose weights and buffers have shapes only. Attached blocks come back un-attached, and hooks do not come:
    what they do besides (counting, collecting) is for real steps.

    Raises ConfigError for what cannot be copied so: quantised weights of some libraries, locks and the like.
    """
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *kept]
    try:
        shadow = copy.deepcopy(model, {id(tensor): _without_values(tensor) for tensor in tensors})
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{type(model).__name__} cannot be copied by shape: {error}") from error
    for module in shadow.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return shadow


def shapes_of(arguments: Any) -> Any:
    """The same structure for the meta device. Values that may decide shapes stay: of whole numbers and masks, and of
    all that is not large."""
    return tree_map_only(Tensor, _shape_of, arguments)


def _shape_of(tensor: Tensor) -> Tensor:
    large = tensor.is_floating_point() and tensor.numel() > _LARGE
    return tensor.detach().to("meta" if large else "cpu").requires_grad_(tensor.requires_grad)


def casting_as(device: torch.device) -> AbstractContextManager[Any]:
    """What autocast does on ``device`` just now, for the meta device."""
    return Casting(device) if torch.is_autocast_enabled(device.type) else nullcontext()


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
