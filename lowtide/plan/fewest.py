"""The lowest peak that blocks can have, whatever time it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.plan.ways import RunWays, Way

_NEVER = 2**100
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Rests:
    """Choices for the last blocks, by rising peaks and falling bytes in CPU memory.

    peaks: above what is held before them. ways, after: of each, the first treatment (its place among the run's, what
    may run last counted on), and the choice for what comes after it.
    """

    peaks: _Ints
    cpus: _Ints
    ways: _Ints
    after: _Ints


def _rests(runs: Sequence[RunWays], cpu_bytes: int | None) -> list[list[_Rests]]:
    """By run, and number of blocks of it that remain with all runs after it: the choices with the lowest peaks.

    With k kept and w working, a treatment in front of a rest of peak P makes it max(k + w, k + P), which rises with P:
    so the lowest P is the right one to build on. Where CPU memory is limited (cpu_bytes), a rest with a higher peak is
    kept beside it if it needs less of that.
    """
    found: list[list[_Rests]] = []
    for run in reversed(runs):
        by_left = [found[-1][-1] if found else _Rests(*np.zeros((4, 0), dtype=np.int64))]
        for left in range(1, run.depth + 1):
            by_left.append(_lowest(_choices(run, left, by_left), cpu_bytes))
        found.append(by_left)
    return found[::-1]


def _choices(run: RunWays, left: int, by_left: Sequence[_Rests]) -> _Rests:
    """Of which the last blocks have one of the run's ways first."""
    columns = [np.zeros((4, 0), dtype=np.int64)]
    for place, way in enumerate(run.ways):
        if way.blocks <= left:
            rests = by_left[left - way.blocks]
            same = np.full(len(rests.peaks), place)
            peaks = way.kept + np.maximum(way.working, rests.peaks)
            columns.append(np.stack((peaks, way.cpu + rests.cpus, same, np.arange(len(same)))))
    for place, way in enumerate(run.last_ways, len(run.ways)):
        if way.blocks == left:
            columns.append(np.array([[way.kept + way.working], [way.cpu], [place], [0]]))
    return _Rests(*np.concatenate(columns, axis=1))


def _lowest(choices: _Rests, cpu_bytes: int | None) -> _Rests:
    """Those that fit, without those than which another is as good in both. cpu_bytes None: the one lowest peak."""
    figures = np.stack((choices.peaks, choices.cpus, choices.ways, choices.after))
    if cpu_bytes is None:
        return _Rests(*figures[:, np.argmin(choices.peaks)][:, None]) if len(choices.peaks) else choices
    figures = figures[:, figures[1] <= cpu_bytes]
    figures = figures[:, np.lexsort((figures[1], figures[0]))]
    least = np.minimum.accumulate(figures[1])
    lower = np.ones(len(least), dtype=bool)
    lower[1:] = figures[1, 1:] < least[:-1]
    return _Rests(*figures[:, lower])


def floors(runs: Sequence[RunWays]) -> list[list[int]]:
    """The lowest peaks alone, by run and number of blocks that remain; CPU memory has no limit."""
    found: list[list[int]] = []
    for run in reversed(runs):
        least = [found[-1][-1] if found else _NEVER]
        ways = [(way.blocks, way.kept, way.working) for way in run.ways]
        closing = {
            left: [w.kept + w.working for w in run.last_ways if w.blocks == left] for left in range(run.depth + 1)
        }
        for left in range(1, run.depth + 1):
            going_on = [kept + max(working, least[left - n]) for n, kept, working in ways if n <= left]
            least.append(min(closing[left] + going_on))
        found.append(least)
    return found[::-1]


def lowest_peak(runs: Sequence[RunWays], cpu_bytes: int | None) -> int:
    """Of all blocks."""
    return floors(runs)[0][-1] if cpu_bytes is None else int(_rests(runs, cpu_bytes)[0][-1].peaks[0])


def fewest_bytes(runs: Sequence[RunWays], cpu_bytes: int | None) -> list[Way]:
    """The choice with the lowest peak of all, in the order of the forward."""
    chosen: list[Way] = []
    place = 0
    for run, by_left in zip(runs, _rests(runs, cpu_bytes), strict=True):
        left = run.depth
        while left:
            rests = by_left[left]
            chosen.append((*run.ways, *run.last_ways)[rests.ways[place]])
            left, place = left - chosen[-1].blocks, int(rests.after[place])
    return chosen
