"""Keeps pinned CPU memory from one attach to the next. For benchmarks alone: pinning is slow and no part of a step.

A handle pins what it needs in its first step and gives it back when it is detached. A benchmark that attaches hundreds
of times would spend its time on the card with that. The pools themselves work as always.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lowtide.runtime import pool

Pin = Callable[[int], torch.Tensor | None]


@contextmanager
def pinned_once() -> Iterator[None]:
    """Inside it, memory pinned for a handle that was detached is used again; all of it is freed at the end."""
    free: dict[int, list[torch.Tensor]] = defaultdict(list)
    original = pool.pinner

    def pinner(device: torch.device) -> Pin:
        pin_anew = original(device)

        def pin(size: int) -> torch.Tensor | None:
            kept = free[size].pop() if free[size] else pin_anew(size)
            if kept is None:
                return None
            lent = kept[:]
            weakref.finalize(lent, free[size].append, kept)
            return lent

        return pin

    pool.pinner = pinner
    try:
        yield
    finally:
        pool.pinner = original
        free.clear()
