"""Host cost of recomputation: microseconds of CPU work that each way adds to one block, forward and backward.

Blocks are so small that arithmetic hardly counts; what is left is what a checkpoint does around a block. Times are CPU
time of this process with one thread (work of others on the machine counts only through shared caches); all rows take
turns; medians. On a card CPU time is that of issuing the work, backward's own thread included. On the CPU, offload
copies within CPU memory and waits for it (``lowtide.testing.cpu_offload``), which counts.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from lowtide.bench.cell import synchronize
from lowtide.bench.host_works import PLAIN, TORCH, Caller, rows, stacks
from lowtide.testing import cpu_offload

DEVICES = ("cpu", "cuda")
GOALS: Mapping[str, float] = {
    "lowtide interval 1": 0.7,
    "lowtide interval 2": 0.7,
    "lowtide unsloth": 1.2,
    "lowtide attention offload": 1.2,
}
"""The most that a row may add, in parts of what torch's checkpoint adds."""
_WARM_UP = 5
_ROUNDS_A_COLLECTION = 50


@dataclass(frozen=True)
class HostCost:
    """Of one row, a block, in µs.

    added_us: over plain; it contains the block's second forward, which every checkpoint pays. ratio_to_torch: to what
    torch's non-reentrant checkpoint adds, measured in the same rounds. lag_us: how much later the card was done, so a
    large one means that the card, not the host, was measured. goal: for ratio_to_torch, where there is one.
    """

    row: str
    total_us: float
    added_us: float
    ratio_to_torch: float
    lag_us: float
    goal: float | None

    @property
    def meets_goal(self) -> bool | None:
        return None if self.goal is None else self.ratio_to_torch <= self.goal


def host_costs(device: str, rounds: int, depth: int, tell: Callable[[str], None]) -> dict[str, list[HostCost]]:
    """The cost of every row by kind of block, in stacks of ``depth`` blocks. tell: is told each kind before it."""
    torch.manual_seed(0)
    found = {}
    with _one_thread(), cpu_offload() if device == "cpu" else nullcontext():
        for title, stack, inputs in stacks(depth, device):
            tell(title)
            found[title] = costs(measure(rows(stack), inputs, rounds, depth, device))
    return found


def costs(medians_us: Mapping[str, tuple[float, float]]) -> list[HostCost]:
    """From total and lag of each row, plain and torch's checkpoint among them."""
    plain_us, torch_us = medians_us[PLAIN][0], medians_us[TORCH][0]
    found = []
    for name, (total_us, lag_us) in medians_us.items():
        added_us = total_us - plain_us
        found.append(HostCost(name, total_us, added_us, added_us / (torch_us - plain_us), lag_us, GOALS.get(name)))
    return found


def measure(
    rows: Mapping[str, tuple[nn.Module, Caller]], inputs: tuple[Any, ...], rounds: int, depth: int, device: str
) -> dict[str, tuple[float, float]]:
    """Median CPU time in µs of forward and backward, a block, of each row; and by how much the device came later."""
    times_us: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(_WARM_UP):
        for model, call in rows.values():
            model(call, *inputs).backward()
    with _collected_between():
        for number in range(rounds):
            for name, (model, call) in rows.items():
                total_us, lag_us = _timed(lambda m=model, c=call: m(c, *inputs).backward(), device)
                times_us[name].append((total_us / depth, lag_us / depth))
            if number % _ROUNDS_A_COLLECTION == _ROUNDS_A_COLLECTION - 1:
                gc.collect()
    return {name: (median(t for t, _ in times), median(lag for _, lag in times)) for name, times in times_us.items()}


def _timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """CPU time of a step and how much later the device was done with it, in µs."""
    synchronize(device)
    begin_ns = time.process_time_ns()
    step()
    total_ns = time.process_time_ns() - begin_ns
    issued_ns = time.perf_counter_ns()
    synchronize(device)
    return total_ns / 1e3, (time.perf_counter_ns() - issued_ns) / 1e3


@contextmanager
def _collected_between() -> Iterator[None]:
    """No garbage collection of Python's within a measured step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
