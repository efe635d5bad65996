"""Peak of the CPU allocator while a function runs, from the profiler's allocation events."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest sum of live allocations made while ``function`` ran; what was allocated before is not in it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    results = recorded.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    live = peak = 0
    for _, size in events:
        live += size
        peak = max(peak, live)
    return peak


def live_tensors(size: int) -> int:
    """How many tensors of ``size`` elements Python still holds, without a collector run."""
    import gc

    return sum(issubclass(type(o), torch.Tensor) and o.numel() == size for o in gc.get_objects())
