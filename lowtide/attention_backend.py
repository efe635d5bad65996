"""What lowtide must know of diffusers' attention dispatcher.

Its choice of kernel is state that a recomputation must see as its forward did; its table of kernels is a place that
attention is called through.
"""

import functools
import sys
from contextlib import AbstractContextManager
from typing import Any

from lowtide.runtime.context import Provider, standard_providers
from lowtide.runtime.entry_points import EntryPoint, standard_entry_points

_MODULE = "diffusers.models.attention_dispatch"

# Kernels of the table that end in torch's own attention, which casts, masks and pads for itself.
_TORCH_OWN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def has_own_state() -> bool:
    """Whether diffusers' attention dispatcher is loaded."""
    return _MODULE in sys.modules


def providers() -> tuple[Provider, ...]:
    """torch's state, and diffusers' active attention backend where diffusers is in use."""
    if not has_own_state():
        return standard_providers()
    dispatch = sys.modules[_MODULE]

    def get() -> Any:
        return dispatch._AttentionBackendRegistry._active_backend

    def enter(value: Any) -> AbstractContextManager[Any]:
        return dispatch.attention_backend(value)

    return (*standard_providers(), Provider("diffusers attention backend", (get,), enter))


def entry_points() -> tuple[EntryPoint, ...]:
    """torch's attention, and the kernels of diffusers' table where diffusers is in use."""
    return (*standard_entry_points(), _table()) if has_own_state() else standard_entry_points()


@functools.cache
def _table() -> EntryPoint:
    registry = sys.modules[_MODULE]._AttentionBackendRegistry
    return EntryPoint(registry, "_backends", leave=_TORCH_OWN)
