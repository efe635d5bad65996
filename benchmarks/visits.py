"""Runs a task's steps in one mode and tells what they took. For benchmarks/offload.py."""

import gc
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from offload_modes import Enter
from torch.profiler import ProfilerActivity, profile
from works import Task

from lowtide.testing import cpu_offload

GIB = 2**30


@dataclass
class Row:
    """All visits of one mode.

    times_ms: of each timed step. host_ms: CPU time of the process in each, threads added; it includes whatever the
    driver spins. gradients: of the last visit's last step, in CPU memory. error: why the mode has no (more) figures.
    """

    times_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    enter_s: float = 0.0
    gradient_difference: float = 0.0
    error: str | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB


class Visitor:
    """Visits modes of one task in turn. The first visit's gradients are what all others are compared with."""

    def __init__(self, task: Task, device: str, traces: Path | None = None) -> None:
        self.task = task
        self.device = device
        self.traces = traces
        self._reference: dict[str, torch.Tensor] | None = None
        self._failed = False

    def visit(self, name: str, enter: Enter, row: Row, steps: int) -> None:
        """``steps`` timed steps after an untimed one, or two where lowtide is attached: it measures itself in them.

        What goes wrong costs this mode only.
        """
        self._clean()
        try:
            with self._simulated():
                self._run(name, enter, row, steps)
        except Exception as error:  # noqa: BLE001 - a mode that fails must not cost the others their time on the card
            traceback.print_exc(limit=-6, file=sys.stderr)
            self._failed = True
            row.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]

    def _run(self, name: str, enter: Enter, row: Row, steps: int) -> None:
        more = {"offload_min_bytes": 1} if self.device == "cpu" else {}
        begin = time.perf_counter()
        with enter(self.task, more) as handle:
            self.task.step()
            self._synchronize()
            row.enter_s = max(row.enter_s, time.perf_counter() - begin)
            if handle is not None:
                self.task.step()
            with self._peak_of(row):
                times_ms, host_ms = self._timed(steps)
            row.times_ms += times_ms
            row.host_ms += host_ms
            if handle is not None:
                receipt = handle.receipt().as_dict()
                row.totals = receipt["totals"]
                row.notes = [f"{note['option']}: {note['reason']}" for note in receipt["inert"] + receipt["ignored"]]
            self._compare(row)
            self._trace(name)

    def _timed(self, steps: int) -> tuple[list[float], list[float]]:
        """The steps follow each other as in training: the host does not wait for the device between them."""
        host_ns, marks = [time.process_time_ns()], [self._mark()]
        for _ in range(steps):
            self.task.step()
            marks.append(self._mark())
            host_ns.append(time.process_time_ns())
        self._synchronize()
        times_ms = [_between_ms(*pair) for pair in itertools.pairwise(marks)]
        return times_ms, [(after - before) / 1e6 for before, after in itertools.pairwise(host_ns)]

    def _mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def _peak_of(self, row: Row) -> Iterator[None]:
        if self.device == "cpu":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        row.peak_bytes = max(row.peak_bytes, torch.cuda.max_memory_allocated())

    def _compare(self, row: Row) -> None:
        found = {name: _gradient(leaf) for name, leaf in self.task.leaves.items()}
        if self._reference is None:
            self._reference = found
        row.gradient_difference = _largest([row.gradient_difference, difference(self._reference, found)])

    def _trace(self, name: str) -> None:
        """One more step under the profiler, as a file for chrome://tracing or Perfetto."""
        if self.traces is None:
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device == "cuda" else [])
        with profile(activities=activities) as profiler:
            self.task.step()
            self._synchronize()
        self.traces.mkdir(parents=True, exist_ok=True)
        plain = "".join(letter if letter.isalnum() else "_" for letter in name)
        profiler.export_chrome_trace(str(self.traces / f"{plain[:60]}.json.gz"))

    def _simulated(self) -> Any:
        return cpu_offload() if self.device == "cpu" else nullcontext()

    def _clean(self) -> None:
        """Nothing of the mode before is left; autograd's gradients are part of none's peak and stay out of it."""
        for leaf in self.task.leaves.values():
            leaf.grad = None
        gc.collect()
        self._synchronize()
        if self._failed and self.device == "cuda":  # out of memory, maybe: leave the next mode all there is
            torch.cuda.empty_cache()
        self._failed = False

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def difference(reference: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of a gradient, relative to that gradient's largest element. NaN where one is not finite."""
    return _largest(
        float((found[name].float() - gradient.float()).abs().max() / gradient.float().abs().max().clamp(min=1e-30))
        for name, gradient in reference.items()
    )


def _largest(values: Iterable[float]) -> float:
    """NaN if one is: Python's own max passes over it."""
    return float(torch.tensor(list(values)).max())


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad.cpu()


def _between_ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
