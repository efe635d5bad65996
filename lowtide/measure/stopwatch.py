"""How long something takes on the accelerator."""

from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], rounds: int) -> list[float]:
    """Of each of some calls, by the device's own clock; the host waits for each."""
    device = torch.accelerator.current_accelerator()
    times_ms = []
    for _ in range(rounds):
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return times_ms
