"""A meter for CPU tensors, so that what a probe learns of memory can be shown without a card."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountingMeter(TorchDispatchMode):
    """Bytes of the storages that operators made while it is entered, and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if storage._cdata not in given:  # what was there before does not count
                self._see(storage)
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self._most = max(self._most, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)

    def allocated(self) -> int:
        return self._now

    def failures(self) -> int:
        return 0

    retries = failures

    def peak(self) -> int:
        return self._most

    def reserved_peak(self) -> int:
        return self._most

    def reset(self) -> None:
        self._most = self._now


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """Of tensors, and those that are given as they are (``Tensor.set_``)."""
    leaves = tree_leaves(value)
    of_tensors = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return of_tensors + [leaf for leaf in leaves if isinstance(leaf, torch.UntypedStorage)]
