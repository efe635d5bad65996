"""What there is to know of the arguments that an attention kernel is called with."""

from collections.abc import Iterable
from typing import Any

import torch

from lowtide.runtime.placeholder import PLAIN_TYPES

_DROPOUT = (4, "dropout_p")  # where torch's attention, and every kernel of diffusers' table, takes it


def as_autocast_would(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments cast before the kernel, so that what it saves is seen to be an argument.

    Leaves that need a gradient are left to autocast, which casts them once for all their uses.
    """
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    dtype = _autocast_dtype(tensor) if tensor is not None else None
    if dtype is None:
        return args, kwargs

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (value.is_leaf and value.requires_grad):
            return value
        return autocast_to(value, dtype)

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def autocast_to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In ``dtype``, if that is what autocast would make of it; else as it is."""
    if tensor.dtype == dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype) if _autocast_dtype(tensor) == dtype else tensor


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a kernel's arguments, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strides over a storage of its own, no subclass."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


def draws_random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the kernel drops out some of its weights."""
    place, name = _DROPOUT
    value = args[place] if len(args) > place else kwargs.get(name, 0.0)
    return isinstance(value, (int, float)) and value > 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
