"""Which attention kernels a run may use, and in which precision it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's is left out: on an H200 with torch 2.11 and cuDNN 9.19 its backward gave wrong and infinite gradients for the
# joint attention of Flux.1 and Flux.2 in bfloat16, and torch prefers it there (benchmarks/LOG.md, 2026-11-29).
_TRUSTED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def computing(mixed_precision: str, device: torch.device) -> Iterator[None]:
    """Autocast to bfloat16 for ``"bf16"``; attention without cuDNN's kernel."""
    with sdpa_kernel(_TRUSTED), torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
        yield
