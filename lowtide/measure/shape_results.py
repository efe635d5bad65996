"""What operators gave on the meta device, so that each runs once for arguments of one kind: most blocks are alike."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_META = torch.device("meta")
_EXACT = (torch.Tensor, torch.nn.Parameter)


class _Spec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class ShapeResults:
    """Of operators that change none of their arguments, by shapes, strides and dtypes of these."""

    def __init__(self) -> None:
        self._made: dict[Any, _Spec | tuple[_Spec | None, ...] | None] = {}

    def of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """``func(*args, **kwargs)``, or new tensors like those that it gave for such arguments before."""
        key = func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items()))
        if None in key:
            return func(*args, **kwargs)
        if key not in self._made:
            output = func(*args, **kwargs)
            self._made[key] = _specs(output, (args, kwargs))
            return output
        made = self._made[key]
        if made is None:
            return func(*args, **kwargs)
        return made.new() if isinstance(made, _Spec) else tuple(one and one.new() for one in made)


def _key(value: Any) -> Any:
    """None where more than shapes decides what comes of it."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in _EXACT and value.is_meta and value.layout is torch.strided
        if not plain or value.dtype.is_complex or value.is_neg():
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        keys = tuple(map(_key, value))
        return None if None in keys else keys
    if isinstance(value, (dict, torch.Generator)):
        return None
    return type(value), value  # True, 1 and 1.0 are equal


def _specs(output: Any, given: Any) -> _Spec | tuple[_Spec | None, ...] | None:
    """None where something that came back is no tensor with a storage of its own."""
    if isinstance(output, torch.Tensor):
        return _spec(output) if _all_new([output], given) else None
    if not isinstance(output, tuple) or not all(one is None or isinstance(one, torch.Tensor) for one in output):
        return None
    return tuple(one if one is None else _spec(one) for one in output) if _all_new(output, given) else None


def _spec(tensor: torch.Tensor) -> _Spec:
    return _Spec(tensor.shape, tensor.stride(), tensor.dtype)


def _all_new(outputs: Iterable[torch.Tensor | None], given: Any) -> bool:
    """Whether each is all of a storage that no other has."""
    tensors = [one for one in outputs if one is not None]
    before = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    if any(tensor.dtype.is_complex or tensor.is_neg() for tensor in tensors):  # they may be conjugate views
        return False
    own = len(set(storages)) == len(storages) and not set(storages) & {one.untyped_storage()._cdata for one in before}
    return own and all(
        tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == _spec(tensor).new().untyped_storage().nbytes()
        for tensor in tensors
    )
