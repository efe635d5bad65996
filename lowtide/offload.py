"""Offload without attach: of everything that a region saves, and of what single checkpoints hold."""

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ConfigError
from lowtide.keys import Size, WholeNumber
from lowtide.plan.schedule import MAX_SIZES, MIN_BYTES
from lowtide.runtime.link import accelerator_or_simulated, simulated
from lowtide.runtime.placeholder import unpack
from lowtide.runtime.receipt import Copies
from lowtide.runtime.store import Store

_Settings = tuple[int, int, bool]
_of_models: "weakref.WeakKeyDictionary[nn.Module, dict[_Settings, Store]]" = weakref.WeakKeyDictionary()


class OffloadedRegion:
    """What ``offload_activations`` returns. Enter it at every step: its CPU buffers are used again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entered: list[saved_tensors_hooks] = []

    def copies(self) -> Copies:
        """What was moved since the first forward after the last backward."""
        return self._store.copies()

    def __enter__(self) -> "OffloadedRegion":
        if self._store.read:
            self._store.begin_step(timed=True)
        else:
            self._store.look_at_weights()
        self._store.leave_block()  # of a single checkpoint, whose store this may be
        hooks = saved_tensors_hooks(self._store.pack, unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)
        self._store.flush()


def offload_activations(
    model: nn.Module | None = None,
    *,
    offload_min_bytes: int | str = MIN_BYTES,
    offload_pin_memory_max_buckets: int = MAX_SIZES,
) -> OffloadedRegion:
    """A context manager: what autograd saves inside it waits in CPU memory until backward.

    model: its parameters and buffers stay where they are; without it, parameters are told by their type alone.
    The pool of CPU buffers is kept for the next call with the same arguments. Raises ConfigError without an
    accelerator. Works like torch.autograd.graph.save_on_cpu, beside the computation.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(f"offload_activations takes the model itself, an nn.Module, or nothing; got {model!r}")
    min_bytes = size(offload_min_bytes, "offload_min_bytes")
    max_buckets = _named("offload_pin_memory_max_buckets", WholeNumber(0), offload_pin_memory_max_buckets)
    accelerator_or_simulated()
    settings = (min_bytes, max_buckets, simulated.get())
    if model is None:
        return OffloadedRegion(shared_store(*settings))
    stores = _of_models.setdefault(model, {})
    if settings not in stores:
        stores[settings] = Store(model, min_bytes=min_bytes, max_sizes=max_buckets)
    return OffloadedRegion(stores[settings])


def size(value: int | str, name: str) -> int:
    """Bytes of a size that a keyword argument gives. ConfigError for anything else, by that argument's name."""
    return _named(name, Size(), value)


def _named(name: str, validate: Callable[[Any], int], value: Any) -> int:
    try:
        return validate(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


@functools.cache
def shared_store(min_bytes: int, max_sizes: int, on_the_cpu: bool) -> Store:
    """The store of regions that belong to no model. A handle has its own."""
    return Store(min_bytes=min_bytes, max_sizes=max_sizes)
