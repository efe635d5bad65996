"""A model's shapes without its values, and a step's arguments likewise: what is traced where memory is scarce."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowtide.errors import ConfigError
from lowtide.measure.casting import Casting


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose weights and buffers have shapes only; attached blocks come back un-attached.

    Raises ConfigError for weights of a kind that has no shape by itself (quantised ones of some libraries).
    """
    tensors = [*model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(model, {id(tensor): _without_values(tensor) for tensor in tensors})
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(f"the weights of {type(model).__name__} cannot be traced by shape: {error}") from error


def shapes_of(arguments: Any) -> Any:
    """The same structure for the meta device: whole numbers and masks may decide shapes, so their values stay."""
    return tree_map_only(Tensor, lambda t: t.detach().to("meta" if t.is_floating_point() else "cpu"), arguments)


def casting_as(device: torch.device) -> AbstractContextManager[Any]:
    """What autocast does on ``device`` just now, for the meta device."""
    return Casting(device) if torch.is_autocast_enabled(device.type) else nullcontext()


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
