"""What a list of device events says of a window of time: how much of it kernels ran, which, and where none did.

Pure arithmetic. An event is (name, start_us, end_us); events may overlap, as they do on several streams.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

Event = tuple[str, float, float]
COPY, GEMM, ATTENTION, OTHER = "copy", "gemm", "attention", "other"
MOST_KERNELS = 10

# Inductor names a fused kernel after the operators that it is for, so "attention" or "mm" in it mean nothing.
_FUSED = re.compile(r"triton_(poi|red|per|for)_")
# CUDA's and ROCm's copies of memory, and the CPU operator.
_COPY = re.compile(r"memcpy|memset|copy(device|host)to|^aten::copy_$", re.IGNORECASE)
# FlashAttention, cuDNN's and CUTLASS's fused attention; asked first: some are built of gemms and say so.
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
# cuBLAS (nvjet: Hopper and later), CUTLASS, Tensile (Cijk), Inductor's templates, and CPU operators. A convolution
# that is computed as a product says gemm in its name, and counts.
_GEMM = re.compile(
    r"gemm|gemv|nvjet|cutlass|^cijk_|triton_tem_.*mm|^(aten|mkldnn)::(_?linear.*|addmm|mm|bmm|baddbmm|_int_mm|_scaled_mm)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Gap:
    """A time in which no kernel ran, after one kernel and before another."""

    us: float
    after: str
    before: str


@dataclass(frozen=True)
class Timeline:
    """Shares from 0 to 1; the window lasts from the start of the first event to the end of the last.

    running, copying: of the window. gemm, attention: of the time of all kernels, copies not among them. gap: the
    largest; None where there was none. top: names with their share of the time of all kernels, largest first.
    """

    running: float
    copying: float
    gemm: float
    attention: float
    gap: Gap | None
    top: tuple[tuple[str, float], ...]


def timeline(events: Iterable[Event]) -> Timeline:
    """Raises ValueError where no kernel took any time: there is nothing to share then."""
    every = sorted(events, key=lambda event: event[1:])
    kernels = [event for event in every if kind_of(event[0]) != COPY]
    times_us = _times_us(kernels)
    total_us = sum(times_us.values())
    if total_us <= 0:
        raise ValueError("no kernel took any time")
    window_us = max(end for _, _, end in every) - every[0][1]
    return Timeline(
        running=covered_us(kernels) / window_us,
        copying=covered_us([event for event in every if kind_of(event[0]) == COPY]) / window_us,
        gemm=sum(us for name, us in times_us.items() if kind_of(name) == GEMM) / total_us,
        attention=sum(us for name, us in times_us.items() if kind_of(name) == ATTENTION) / total_us,
        gap=largest_gap(kernels),
        top=tuple((name, us / total_us) for name, us in islice(times_us.items(), MOST_KERNELS)),
    )


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    if _COPY.search(name):
        return COPY
    if _FUSED.match(name):
        return OTHER
    if _ATTENTION.search(name):
        return ATTENTION
    return GEMM if _GEMM.search(name) else OTHER


def covered_us(events: Sequence[Event]) -> float:
    """Time in which at least one of them ran; they come in the order of their starts."""
    covered, until = 0.0, float("-inf")
    for _, start, end in events:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def largest_gap(events: Sequence[Event]) -> Gap | None:
    """Between events in the order of their starts: the first of the largest."""
    largest: Gap | None = None
    last: Event | None = None
    for event in events:
        if last is not None and event[1] - last[2] > (largest.us if largest else 0.0):
            largest = Gap(event[1] - last[2], last[0], event[0])
        if last is None or event[2] > last[2]:
            last = event
    return largest


def _times_us(events: Iterable[Event]) -> dict[str, float]:
    """By name, the longest first."""
    times_us: dict[str, float] = {}
    for name, start, end in events:
        times_us[name] = times_us.get(name, 0.0) + end - start
    return dict(sorted(times_us.items(), key=lambda item: -item[1]))
