"""How much device memory ``auto`` may take, and the limit that holds PyTorch to it."""

import os
import sys

import torch

from lowtide.allocator import EARLIER, SETTINGS, SMALLEST_PAGES, VARIABLES
from lowtide.errors import ConfigError
from lowtide.keys import AUTO
from lowtide.measure.device import available_bytes, budget_within

_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
"""Of newer versions of torch, and of older ones. There is no public name."""
_PAGE_BYTES, _SMALL_PAGE_BYTES = 20 * 2**20, 12 * 2**20
"""Of an expandable segment as PyTorch has it, and as ``SETTINGS`` do."""


def budget_bytes(given: int | str | None) -> int:
    """What PyTorch may reserve. given: bytes, or ``auto`` or None: what is free and what this process holds, less a
    margin. Raises ConfigError where no accelerator tells what is free."""
    if isinstance(given, int):
        return given
    there = available_bytes()
    if there is None:
        raise ConfigError(
            f"vram_budget = {AUTO} takes what a CUDA device has free, and there is none: say how much, as in 16GiB"
        )
    return budget_within(there)


_standing: dict[torch.device, list["Limit"]] = {}
_before: dict[torch.device, float] = {}  # what each device was held to before the first of them


def page_bytes() -> int:
    """PyTorch compares what is asked for with a limit, and then takes whole pages: this much more, at most."""
    return _PAGE_BYTES if runs_out_early() else _SMALL_PAGE_BYTES


def within_pages(device: torch.device, size_bytes: int) -> int:
    """How much may be asked for in all, so that no more than ``size_bytes`` is taken."""
    return max(0, size_bytes - page_bytes()) if device.type == "cuda" else size_bytes


def runs_out_early() -> bool:
    """Whether memory runs out soon after PyTorch begins to give back what it has cached: with somebody's own choice of
    settings, whose pages are larger, and where there are no pages at all."""
    settings = next((os.environ[name] for name in VARIABLES if name in os.environ), SETTINGS)
    return sys.platform != "linux" or SMALLEST_PAGES not in settings


class Limit:
    """Holds PyTorch's allocator of one CUDA device to a budget: it gives cached memory back before it takes more, and
    runs out of memory rather than go over it. New memory comes as ``SETTINGS`` say. Nothing on other devices."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.empty_cache()  # what is cached above the limit would stay there
            self._expand(True)
            total_bytes = torch.cuda.get_device_properties(self._device).total_memory
            self._share = within_pages(self._device, size_bytes) / total_bytes
            if not _standing.get(self._device):
                _before[self._device] = torch.cuda.get_per_process_memory_fraction(self._device)
            _standing.setdefault(self._device, []).append(self)
            self._apply()

    def lift(self) -> None:
        """Those of other handles on the device stay: the lowest counts."""
        if self._device is not None:
            _standing[self._device].remove(self)
            self._apply()
            if not any(_standing.values()):
                self._expand(False)

    def _apply(self) -> None:
        assert self._device is not None
        shares = [_before[self._device], *(limit._share for limit in _standing[self._device])]
        torch.cuda.set_per_process_memory_fraction(min(shares), self._device)

    @staticmethod
    def _expand(on: bool) -> None:
        """As ``PYTORCH_ALLOC_CONF`` would, but now. Somebody's own choice there stays."""
        if torch.cuda.get_allocator_backend() == "native" and not set(VARIABLES).intersection(os.environ):
            known = vars(torch._C)
            change = next(known[name] for name in _SETTERS if name in known)
            change(SETTINGS if on else EARLIER)
