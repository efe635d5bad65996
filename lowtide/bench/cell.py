"""Runs one cell in this process: builds the work, enters the mode, times steps, and tells all of it as a record."""

import gc
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.auto.handle import AutoHandle
from lowtide.auto.measuring import MOST_STEPS
from lowtide.bench.attention import kernels
from lowtide.bench.isolate import Died, isolated
from lowtide.bench.modes import mode
from lowtide.bench.planned import planned
from lowtide.bench.record import Condition, Figures, Record
from lowtide.bench.works import Task, build
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.handle import Handle
from lowtide.measure.cover import uncovered
from lowtide.testing import cpu_offload

_FEWEST_STEPS = 2


@dataclass(frozen=True)
class Effort:
    """How a cell is measured.

    warm_up: steps that are not counted (compilation, pinning, clocks). steps: counted ones. most_s: once the counted
    steps have taken so long, no further one is begun; two are made anyway. timeout_s: of the whole cell. most_warm_up:
    steps within which ``auto`` has to settle.
    """

    warm_up: int = 5
    steps: int = 10
    most_s: float = 60.0
    timeout_s: float = 1800.0
    most_warm_up: int = MOST_STEPS


@dataclass
class _Measured:
    first_step_s: float = 0.0
    warm_up_steps: int = 0
    most_reserved_bytes: int | None = None
    times_s: list[float] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0


def run_cell(condition: Condition, effort: Effort, device: str, machine: Mapping[str, Any]) -> Record:
    """The record of a cell, whatever happens in it: an error is its state and reason."""
    try:
        figures, receipt = _measure(condition, effort, device)
        return Record(condition, "ok", machine, figures=figures, receipt=receipt)
    except torch.OutOfMemoryError as error:
        return Record(condition, "oom", machine, reason=_first_line(error))
    except UnsupportedError as error:
        return Record(condition, "unsupported", machine, reason=str(error))
    except Exception as error:  # noqa: BLE001 - a cell that fails for any reason is a result, and costs no other cell
        return Record(condition, "failed", machine, reason=in_a_line(error))


def run_apart(condition: Condition, effort: Effort, device: str, machine: Mapping[str, Any]) -> Record:
    """``run_cell`` in a process of its own; where that dies, the cell has failed."""
    try:
        return isolated(run_cell, condition, effort, device, machine, device=device, timeout_s=effort.timeout_s)
    except Died as ending:
        return Record(condition, "failed", machine, reason=str(ending))


@contextmanager
def entered(condition: Condition, device: str) -> Iterator[tuple[Task, Handle | AutoHandle | None]]:
    """The task of a cell in the cell's mode; with a handle where lowtide is attached. Raises what building raises."""
    task = build(condition, device)
    if device != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()  # what building left there is no part of the cell
    if condition.compile == "regional":
        compile_blocks(task)
    more: dict[str, Any] = {}
    if condition.size == "tiny" and mode(condition.mode).attaches:
        more["offload_min_bytes"] = 1
    if condition.vram_budget is not None:
        more["vram_budget"] = condition.vram_budget
    with (
        cpu_offload() if device == "cpu" else nullcontext(),
        kernels(condition.attention),
        mode(condition.mode).enter(task, **more) as handle,
    ):
        yield task, handle


def _measure(condition: Condition, effort: Effort, device: str) -> tuple[Figures, dict[str, Any] | None]:
    begin = time.perf_counter()
    with entered(condition, device) as (task, handle):
        measured = _steps(task, handle, effort, device, begin)
        receipt = receipt_of(task, handle) if handle is not None else None
    figures = Figures(
        step_s=statistics.median(measured.times_s),
        step_times_s=tuple(measured.times_s),
        warm_up_steps=measured.warm_up_steps,
        peak_allocated_bytes=measured.peak_allocated_bytes,
        peak_reserved_bytes=measured.peak_reserved_bytes,
        host_peak_bytes=host_peak_bytes(),
        first_step_s=measured.first_step_s,
        parameters=task.parameters,
        trainable_parameters=sum(tensor.numel() for tensor in task.trained),
        most_reserved_bytes=measured.most_reserved_bytes,
    )
    return figures, receipt


def _steps(task: Task, handle: Handle | AutoHandle | None, effort: Effort, device: str, begin: float) -> _Measured:
    """Steps follow each other as in training; the host waits for the device once a step, for its time."""
    measured = _Measured()
    auto = handle if isinstance(handle, AutoHandle) else None
    reserved = []
    for number in _warm_up(auto, effort):
        with _planning(auto):
            task.step()
        synchronize(device)
        if number == 0:
            measured.first_step_s = time.perf_counter() - begin
        measured.warm_up_steps = number + 1
        if device != "cpu":  # now: the next step that auto measures resets it
            reserved.append(torch.accelerator.max_memory_reserved())
    gc.collect()
    with peaks(device, measured):
        while _goes_on(measured.times_s, effort):
            start = time.perf_counter()
            task.step()
            synchronize(device)
            measured.times_s.append(time.perf_counter() - start)
    if auto is not None and device != "cpu":
        measured.most_reserved_bytes = max(*reserved, measured.peak_reserved_bytes)
    return measured


def _warm_up(auto: AutoHandle | None, effort: Effort) -> Iterator[int]:
    """Numbers of the steps before those that count. ``auto`` has to settle in them: the last one is the first under the
    schedule that stays. Raises RuntimeError where it does not."""
    yield from range(effort.warm_up)
    number = effort.warm_up
    while auto is not None and not auto.settled:
        if number >= effort.most_warm_up:
            raise RuntimeError(f"auto had not settled after {number} steps")
        yield number
        number += 1


@contextmanager
def _planning(auto: AutoHandle | None) -> Iterator[None]:
    """Around a step. Nothing fits in the budget, or the step cannot be planned: ``auto`` is not for this model then."""
    try:
        yield
    except ConfigError as error:
        if auto is None:
            raise
        raise UnsupportedError(str(error)) from error


def _goes_on(times_s: list[float], effort: Effort) -> bool:
    return len(times_s) < effort.steps and (len(times_s) < _FEWEST_STEPS or sum(times_s) < effort.most_s)


@contextmanager
def peaks(device: str, measured: _Measured) -> Iterator[None]:
    """On the CPU the device's memory is the process's."""
    if device == "cpu":
        yield
        measured.peak_allocated_bytes = measured.peak_reserved_bytes = host_peak_bytes()
        return
    torch.accelerator.reset_peak_memory_stats()
    yield
    measured.peak_allocated_bytes = torch.accelerator.max_memory_allocated()
    measured.peak_reserved_bytes = torch.accelerator.max_memory_reserved()


def compile_blocks(task: Task) -> None:
    """Regional compilation: each block compiled by itself, blocks of one class share what is compiled."""
    for block in task.blocks:
        block.compile()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def host_peak_bytes() -> int:
    """Of this process, over its life."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def receipt_of(task: Task, handle: Handle | AutoHandle) -> dict[str, Any]:
    """The receipt with its blocks counted by treatment; a stack that nothing treats is told as inert. Of ``auto``, what
    it planned too."""
    receipt = handle.receipt().as_dict()
    missing = [
        {"option": "backend", "reason": f"{len(names)} blocks of {kind} ({names[0]} the first) are in no treated stack"}
        for kind, names in uncovered(task.model, task.stacks)
    ]
    treatments = Counter(block["treatment"] for block in receipt["blocks"])
    counted = {**receipt, "blocks": dict(treatments), "inert": receipt["inert"] + missing}
    if isinstance(handle, AutoHandle) and handle.plan is not None and handle.budget_bytes is not None:
        counted["plan"] = planned(handle.plan, handle.budget_bytes)
    return counted


def in_a_line(error: BaseException) -> str:
    """An error as the reason why something has no figures."""
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
