"""How fast pinned copies between the accelerator and CPU memory are, as offload makes them."""

import statistics

import torch

from lowtide.measure.stopwatch import milliseconds
from lowtide.plan.costs import LinkRates
from lowtide.runtime.pool import pinner

_SIZE_BYTES = 256 * 2**20
_ROUNDS = 6  # the first is not counted


def link_rates() -> LinkRates:
    """Of the current accelerator: medians, one direction alone at a time."""
    device = torch.accelerator.current_accelerator()
    here = torch.empty(_SIZE_BYTES, dtype=torch.uint8, device=device)
    pinned = pinner(here.device)(_SIZE_BYTES)  # torch's own pinned memory would stay pinned
    there = pinned if pinned is not None else torch.empty(_SIZE_BYTES, dtype=torch.uint8)
    return LinkRates(_gib_per_s(there, here), _gib_per_s(here, there))


def _gib_per_s(to: torch.Tensor, source: torch.Tensor) -> float:
    times_ms = milliseconds(lambda: to.copy_(source, non_blocking=True), _ROUNDS)
    return _SIZE_BYTES / 2**30 / statistics.median(times_ms[1:]) * 1e3
