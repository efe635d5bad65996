"""Attention kernels that a cell can be held to."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.errors import ConfigError

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_DEFAULT, _FALLBACK = "default", "no-cudnn"
"""no-cudnn: what torch chooses of the others; cuDNN's backward fails on Flux's joint attention in torch 2.11."""
ATTENTION = (_DEFAULT, _FALLBACK, *KERNELS)


def kernels(name: str) -> AbstractContextManager[Any]:
    """torch's attention by that kernel alone, while a ``with`` lasts. Raises ConfigError for an unknown name."""
    if name not in ATTENTION:
        raise ConfigError(f"unknown attention {name!r}; allowed: {', '.join(ATTENTION)}")
    if name == _DEFAULT:
        return nullcontext()
    if name == _FALLBACK:
        return sdpa_kernel([kernel for key, kernel in KERNELS.items() if key != "cudnn"])
    return sdpa_kernel([KERNELS[name]])
