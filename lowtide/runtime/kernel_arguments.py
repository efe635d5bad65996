"""What there is to know of the arguments that an attention kernel is called with."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from lowtide.runtime.entry_points import TORCHS
from lowtide.runtime.placeholder import PLAIN_TYPES

_MASK, _DROPOUT = (3, "attn_mask"), (4, "dropout_p")
"""Where torch's attention takes them, and, of the second, every kernel of diffusers' table."""
_ADDING = {"cpu": SDPBackend.FLASH_ATTENTION, "cuda": SDPBackend.EFFICIENT_ATTENTION}
"""The kernels that add 0 or -inf where a mask is boolean. cuDNN's adds another number."""
_ALIGNED = 8
"""Numbers of which the rows of a mask are a multiple, or a kernel on CUDA copies it."""


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


def adds_mask(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``kernel`` is torch's own attention and, called so, makes an additive mask of a boolean one, and saves
    that for backward."""
    query = _query(args, kwargs)
    if kernel is not TORCHS or boolean_mask(args, kwargs) is None or not isinstance(query, torch.Tensor):
        return False
    if query.is_meta:  # a trace, which counts on such a kernel
        return True
    adding = _ADDING.get(query.device.type)
    if adding is None or torch._C._len_torch_function_stack():  # a mode may look at the mask
        return False
    try:
        choice = torch._fused_sdp_choice(*args, **kwargs)  # pyright: ignore[reportPrivateImportUsage]
        return choice == adding.value
    except (TypeError, RuntimeError):  # the kernel says what is wrong
        return False


def mask_to_add(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The boolean mask of which the kernel makes an additive one (``adds_mask``)."""
    return boolean_mask(args, kwargs) if adds_mask(kernel, args, kwargs) else None


def boolean_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The mask that torch's attention is given, if it is a plain boolean one."""
    mask = _given(_MASK, args, kwargs)
    return mask if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and is_plain(mask) else None


def with_additive_mask(
    mask: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of torch's attention with the additive mask that it would make of a boolean one."""
    return with_mask(_additive(mask, _query(args, kwargs)), args, kwargs)


def additive_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What ``with_additive_mask`` has put among the arguments."""
    return _given(_MASK, args, kwargs)  # type: ignore[no-any-return]


def with_mask(
    added: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of torch's attention with another mask."""
    place, name = _MASK
    if len(args) > place:
        return (*args[:place], added, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: added}


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if query.is_meta:
        return mask.to("meta", query.dtype)  # values do not matter
    if not mask.dim():
        return mask.new_zeros((), dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    width = mask.shape[-1]
    padded = -(-width // _ALIGNED) * _ALIGNED if mask.is_cuda else width
    made = mask.new_zeros((*mask.shape[:-1], padded), dtype=query.dtype)[..., :width]
    return made.masked_fill_(mask.logical_not(), -math.inf)


def _query(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("query")


def _given(argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name = argument
    return args[place] if len(args) > place else kwargs.get(name)


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a kernel's arguments, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strides over a storage of its own, no subclass."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


def draws_random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the kernel drops out some of its weights."""
    value = _given(_DROPOUT, args, kwargs)
    return isinstance(value, (int, float)) and value > 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
