"""diffusers' own choice of attention kernel, as state that a recomputation must see as its forward did."""

import sys
from contextlib import AbstractContextManager
from typing import Any

from lowtide.runtime.context import Provider, standard_providers

_MODULE = "diffusers.models.attention_dispatch"


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
