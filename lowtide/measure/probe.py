"""Watches one real step, forward and backward: how long each block takes, and how much memory it has taken at most.

Marks are events of the device's stream where there is one, so that nothing waits; they are read when the step is over.
Backward has no hooks at a block's ends: a block's backward begins when the gradient of its output is there, and lasts
until the next block's begins.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack

Block = tuple[str, int]


@dataclass(frozen=True)
class BlockTime:
    """Milliseconds of one block, what is recomputed of it included."""

    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Probed:
    """One step. blocks: by stack and index. step_ms: from the first block's forward to the end of backward.

    peak_bytes, reserved_bytes: the most that the allocator had given out, and taken, over the blocks; None on the CPU.
    """

    blocks: Mapping[Block, BlockTime]
    step_ms: float
    peak_bytes: int | None
    reserved_bytes: int | None


class StepProbe:
    """Hooks on every block from ``start`` to ``stop``. One forward and its backward run between them.

    It resets the device's peak statistics at its start: what others read of them begins there.
    """

    def __init__(self, stacks: Sequence[ResolvedStack], device: torch.device) -> None:
        self._stacks = stacks
        self._mark = _marks_of(device)
        self._memory = torch.cuda if device.type == "cuda" else None
        self._hooks: list[RemovableHandle] = []
        self._forward: dict[Block, tuple[Any, Any]] = {}
        self._began: dict[Block, Any] = {}
        self._order: list[tuple[Block, Any]] = []
        self._end: Any = None
        self._peaks: tuple[int | None, int | None] = (None, None)

    def start(self) -> "StepProbe":
        if self._memory is not None:
            self._memory.reset_peak_memory_stats()
        for stack in self._stacks:
            for index, (_, block) in enumerate(stack.blocks):
                self._hooks += self._watched((stack.name, index), block)
        return self

    def stop(self) -> Probed | None:
        """What was seen; None where backward did not run through, or did not come to every block of the forward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._end is None or not self._order or len(self._order) < len(self._forward):
            return None
        first = next(iter(self._forward.values()))[0]
        return Probed(dict(self._times()), _ms(first, self._end), *self._peaks)

    def _times(self) -> Iterator[tuple[Block, BlockTime]]:
        ends = [mark for _, mark in self._order[1:]] + [self._end]
        for (block, begin), end in zip(self._order, ends, strict=True):
            yield block, BlockTime(_ms(*self._forward[block]), _ms(begin, end))

    def _watched(self, name: Block, block: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def before(module: nn.Module, args: Any) -> None:
            if not _in_backward():
                self._began.setdefault(name, self._mark())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if _in_backward() or name in self._forward:
                return
            given = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            if given:
                self._forward[name] = (self._began[name], self._mark())
            for tensor in given:
                tensor.register_hook(lambda gradient: self._begin_backward(name))

        return (
            block.register_forward_pre_hook(before, prepend=True),
            block.register_forward_hook(after),
        )

    def _begin_backward(self, name: Block) -> None:
        if any(name == known for known, _ in self._order):
            return
        if not self._order:
            queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._finish)
        self._order.append((name, self._mark()))

    def _finish(self) -> None:
        self._end = self._mark()
        if self._memory is not None:
            self._peaks = self._memory.max_memory_allocated(), self._memory.max_memory_reserved()


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
