"""What tells how much device memory tensors take."""

from typing import Protocol

import torch


class Meter(Protocol):
    """Bytes that the allocator has given out. ``peak`` is the most since ``reset``. Since the process began:
    ``failures``, how often it had none left, and ``retries``, how often it gave back what it had cached to have some.
    """

    def allocated(self) -> int: ...

    def peak(self) -> int: ...

    def reserved_peak(self) -> int: ...

    def failures(self) -> int: ...

    def retries(self) -> int: ...

    def reset(self) -> None: ...


class CudaMeter:
    """Of one CUDA device. ``reset`` resets what others read, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def failures(self) -> int:
        return self._count("num_ooms")

    def retries(self) -> int:
        return self._count("num_alloc_retries")

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _count(self, name: str) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self._device).get(name, 0)


def meter_of(device: torch.device) -> Meter | None:
    """None where nothing tells: on the CPU."""
    return CudaMeter(device) if device.type == "cuda" else None
