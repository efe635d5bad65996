"""Diffusers' own gradient checkpointing, as long as a ``with`` lasts: what its users have without lowtide."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.errors import UnsupportedError


@contextmanager
def diffusers_checkpointing(model: nn.Module) -> Iterator[None]:
    """Raises UnsupportedError where the class has none."""
    switch: Any = model
    if not getattr(model, "_supports_gradient_checkpointing", False):
        raise UnsupportedError(f"diffusers' {type(model).__name__} does not support gradient checkpointing")
    switch.enable_gradient_checkpointing()
    try:
        yield
    finally:
        switch.disable_gradient_checkpointing()
