"""What an accelerator has to give: memory, and speed."""

from collections.abc import Callable

import torch

from lowtide.measure.cards import Card
from lowtide.measure.link import link_rates
from lowtide.measure.stopwatch import milliseconds

_ROUNDS = 8
_OF_PRODUCTS = 0.6  # of the rate of large products is what transformer blocks reach, attention and the rest included
_SPARE_BYTES = 512 * 2**20
_SPARE_SHARE = 0.03


def available_bytes() -> int | None:
    """Free now, and what this process holds; None without an accelerator that says so."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def budget_within(memory_bytes: int) -> int:
    """What ``vram_budget="auto"`` takes of it: 512 MiB or 3 % are left, whichever is more."""
    return memory_bytes - max(_SPARE_BYTES, int(_SPARE_SHARE * memory_bytes))


def measured_card(device: torch.device) -> Card:
    """What the device does, measured in a fraction of a second: for forecasts before any step has run."""
    size = 4096
    own = torch.Generator(device).manual_seed(0)  # nobody else's random numbers may change
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=own) for _ in range(2))
    flops_per_s = 2 * size**3 / _least_s(lambda: torch.mm(a, b))
    memory_bytes_per_s = 2 * a.nbytes / _least_s(lambda: a.copy_(b))
    total_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Card(name, total_bytes, _OF_PRODUCTS * flops_per_s, memory_bytes_per_s, link_rates())


def _least_s(run: Callable[[], object]) -> float:
    return min(milliseconds(run, _ROUNDS)) / 1e3
