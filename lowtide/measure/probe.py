"""Watches one real step, forward and backward: how long each block takes, and what memory.

Marks are events of the device's stream where there is one, so that nothing waits; they are read when the step is over.
Backward has no hooks at a block's ends: a block's backward begins when the gradient of its output is there, and lasts
until the next block's begins. The allocator's figures are the host's, in the order in which it issues work, so they
need no waiting either; reading them takes time, though, so they are left out where time counts.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lowtide.measure.meter import Meter
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack
from lowtide.runtime.swap import Routes, intercept, release

Block = tuple[str, int]


@dataclass(frozen=True)
class BlockTime:
    """Milliseconds of one block, what is recomputed of it included."""

    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block. kept: by how much what is allocated had risen when the next block of the stack began, or its
    own forward ended if it is the last. working: what its backward had at most above what was there before the gradient
    of its output was."""

    kept_bytes: int
    working_bytes: int


@dataclass(frozen=True)
class Probed:
    """One step. times, memory: by stack and index. step_ms: from the first block's forward to the end of backward.

    peak_bytes, reserved_bytes: the most that the allocator had given out, and taken, over the blocks. Without a meter
    there is no memory, and the two are None. retries: how often the allocator gave back what it had cached, until the
    next step.
    """

    times: Mapping[Block, BlockTime]
    memory: Mapping[Block, BlockMemory]
    step_ms: float
    peak_bytes: int | None
    reserved_bytes: int | None
    retries: int = 0


@dataclass
class _Seen:
    """Of one block: marks, and bytes allocated, at the two ends of its forward (without what passes) and at the
    beginning of its backward.

    gradient_bytes: of its output's gradient. most_bytes: until the next block's backward began.
    """

    start: Any
    before_bytes: int
    end: Any = None
    after_bytes: int = 0
    backward: Any = None
    begin_bytes: int = 0
    gradient_bytes: int = 0
    most_bytes: int = 0


@dataclass
class _Peak:
    """Of the whole step, from the meter's pieces of it."""

    peak_bytes: int = 0
    reserved_bytes: int = 0
    retries_before: int = 0


@dataclass
class StepProbe:
    """Watches every block from ``start`` to ``stop``. One forward and its backward run between them.

    Not by hooks of modules: these would be compiled with a compiled block.

    meter: of the device; None: no memory is measured. each: that of each block, too; the meter is then reset at every
    block's backward, else at the start only. routes: of the probes of one model, one after another. passing: bytes that
    are on the device only on their way to CPU memory, or back: no block keeps them.
    """

    stacks: Sequence[ResolvedStack]
    device: torch.device
    meter: Meter | None = None
    each: bool = False
    routes: Routes = field(default_factory=Routes)
    passing: Callable[[], int] = lambda: 0
    active: bool = field(default=False, init=False)
    _names: dict[int, Block] = field(default_factory=dict)
    _seen: dict[Block, _Seen] = field(default_factory=dict)
    _order: list[Block] = field(default_factory=list)
    _end: Any = None
    _whole: _Peak = field(default_factory=_Peak)

    def start(self) -> "StepProbe":
        self._mark = _marks_of(self.device)
        if self.meter is not None:
            self.meter.reset()
            self._whole.retries_before = self.meter.retries()
        blocks = [(name, block) for stack in self.stacks for name, block in stack.blocks]
        self._names = {
            id(block): (stack.name, index) for stack in self.stacks for index, (_, block) in enumerate(stack.blocks)
        }
        intercept(blocks, self.routes.to(self), around=True)
        self.active = True
        return self

    def stop(self) -> Probed | None:
        """What was seen; None where backward did not run through, or did not come to every block of the forward."""
        self.active = False
        release([block for stack in self.stacks for _, block in stack.blocks], self.routes)
        forwards = [seen for seen in self._seen.values() if seen.end is not None]
        if self._end is None or not self._order or len(self._order) < len(forwards):
            return None
        step_ms = _ms(forwards[0].start, self._end)
        times = dict(self._times())
        if self.meter is None:
            return Probed(times, {}, step_ms, None, None)
        memory = dict(self._memory()) if self.each else {}
        retries = self.meter.retries() - self._whole.retries_before
        return Probed(times, memory, step_ms, self._whole.peak_bytes, self._whole.reserved_bytes, retries)

    def _times(self) -> Iterator[tuple[Block, BlockTime]]:
        ends = [self._seen[name].backward for name in self._order[1:]] + [self._end]
        for name, end in zip(self._order, ends, strict=True):
            seen = self._seen[name]
            yield name, BlockTime(_ms(seen.start, seen.end), _ms(seen.backward, end))

    def _memory(self) -> Iterator[tuple[Block, BlockMemory]]:
        following = dict(pairwise(self._seen))
        for name in self._order:
            seen, after = self._seen[name], following.get(name)
            # only the next block's caller has let go of what this one was given
            until_bytes = self._seen[after].before_bytes if after and after[0] == name[0] else seen.after_bytes
            working = seen.most_bytes - seen.begin_bytes + seen.gradient_bytes
            yield name, BlockMemory(max(0, until_bytes - seen.before_bytes), working)

    def run(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A block's call, in the forward between two marks."""
        name = self._names.get(id(module))
        if name is None or name in self._seen or not self.active or _in_backward():
            return original(module, *args, **kwargs)
        seen = self._seen[name] = _Seen(self._mark(), self._staying())
        output = original(module, *args, **kwargs)
        given = [tensor for tensor in tensors_of(output) if tensor.requires_grad and not tensor.is_leaf]
        if given:
            seen.end, seen.after_bytes = self._mark(), self._staying()
        for tensor in given:
            tensor.register_hook(functools.partial(self._begin_backward, name))
        return output

    run_eagerly = run

    def _begin_backward(self, name: Block, gradient: torch.Tensor) -> None:
        if not self.active:  # stopped: what is measured now is somebody else's
            return
        seen = self._seen[name]
        seen.gradient_bytes += gradient.nbytes
        if seen.backward is not None:
            return
        if not self._order:
            self._finish_at_the_end()
        elif self.each:
            self._close(self._order[-1])
        seen.backward, seen.begin_bytes = self._mark(), self._allocated()
        self._order.append(name)

    def _finish_at_the_end(self) -> None:
        if self.meter is not None and self.each:
            self._note(self.meter)
        queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
        queue(self._finish)

    def _finish(self) -> None:
        if not self.active:
            return
        self._close(self._order[-1])
        self._end = self._mark()

    def _close(self, name: Block) -> None:
        """Its backward is over."""
        if self.meter is not None:
            self._seen[name].most_bytes = self._note(self.meter)

    def _note(self, meter: Meter) -> int:
        """The peak since the last one, which becomes part of the step's. What others read is reset only where that of
        each block is asked for."""
        peak_bytes = meter.peak()
        self._whole.peak_bytes = max(self._whole.peak_bytes, peak_bytes)
        self._whole.reserved_bytes = max(self._whole.reserved_bytes, meter.reserved_peak())
        if self.each:
            meter.reset()
        return peak_bytes

    def _allocated(self) -> int:
        return self.meter.allocated() if self.meter is not None and self.each else 0

    def _staying(self) -> int:
        return self._allocated() - self.passing() if self.each else 0


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _marks_of(device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return time.perf_counter

    def mark() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return mark


def _ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1e3 * (end - start)
    end.synchronize()
    return start.elapsed_time(end)
