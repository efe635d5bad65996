"""Where a step's time goes on the device, by torch's profiler. It slows a step: no seconds a step come from here."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.bench.cell import entered, synchronize
from lowtide.bench.record import Condition
from lowtide.bench.timeline import Event, Timeline, timeline
from lowtide.bench.works import Task
from lowtide.errors import MachineError

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


def profiled(condition: Condition, device: str, warm_up: int, steps: int) -> Timeline:
    """The timeline of ``steps`` steps that follow each other, after ``warm_up`` others.

    On the CPU an event is the time that an operator itself took, without the operators that it calls. Raises
    MachineError where the profiler cannot see the device.
    """
    activity = _ACTIVITIES.get(device)
    if activity is None or activity not in torch.profiler.supported_activities():
        raise MachineError(f"torch's profiler cannot see what runs on {device}; it can on {', '.join(_ACTIVITIES)}")
    with entered(condition, device) as (task, _):
        _steps(task, warm_up, device)
        with profile(activities=[activity]) as profiler:
            _steps(task, steps, device)
    events = profiler.events() or ()
    try:
        return timeline(_operators(events) if device == "cpu" else _kernels(events))
    except ValueError as error:
        why = f"{error}. Another profiler may be running"
        raise MachineError(f"torch's profiler saw nothing run on {device}: {why}") from error


def _steps(task: Task, count: int, device: str) -> None:
    for _ in range(count):
        task.step()
    synchronize(device)


def _kernels(events: Iterable[Any]) -> Iterator[Event]:
    """What ran on the device. Annotations span kernels without being any."""
    for event in events:
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            yield event.name, event.time_range.start, event.time_range.end


def _operators(events: Iterable[Any]) -> Iterator[Event]:
    """What operators did themselves: their time, cut where they called others.

    Nodes of the autograd graph are none: beside operators they run Python, as recomputation's.
    """
    for event in events:
        if event.is_user_annotation or "::" not in event.name or "autograd::" in event.name:
            continue
        begin = event.time_range.start
        for called in sorted(event.cpu_children, key=lambda child: child.time_range.start):
            yield event.name, begin, max(begin, called.time_range.start)
            begin = max(begin, called.time_range.end)
        yield event.name, begin, max(begin, event.time_range.end)
