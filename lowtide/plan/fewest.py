"""The lowest peak that the last blocks of a model can have, whatever time it takes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowtide.plan.ways import RunWays, Way

_NEVER = 2**100


class Rest(NamedTuple):
    """A choice for the last blocks. peak: above what is held before them. cpu: bytes in CPU memory."""

    peak: int
    cpu: int
    way: Way
    after: "Rest | None"


def rests(runs: Sequence[RunWays], cpu_bytes: int | None = None) -> list[list[list[Rest]]]:
    """By run, and number of blocks of it that remain with all runs after it: the choices with the lowest peaks.

    With k kept and w working, a treatment in front of a rest of peak P makes it max(k + w, k + P), which rises with P:
    so the lowest P is the right one to build on. Where CPU memory is limited (cpu_bytes), a rest with a higher peak is
    kept beside it if it needs less of that.
    """
    found: list[list[list[Rest]]] = []
    for run in reversed(runs):
        by_left: list[list[Rest]] = [found[-1][-1] if found else []]
        for left in range(1, run.depth + 1):
            by_left.append(_lowest(_choices(run, left, by_left, cpu_bytes is not None), cpu_bytes))
        found.append(by_left)
    return found[::-1]


def _choices(run: RunWays, left: int, by_left: Sequence[Sequence[Rest]], limited: bool) -> Iterator[Rest]:
    for way in run.last_ways:
        if way.blocks == left:
            yield Rest(way.kept + way.working, 0, way, None)
    for way in run.ways:
        for after in by_left[left - way.blocks] if way.blocks <= left else ():
            cpu = way.cpu + after.cpu if limited else 0
            yield Rest(way.kept + max(way.working, after.peak), cpu, way, after)


def _lowest(choices: Iterable[Rest], cpu_bytes: int | None) -> list[Rest]:
    lowest: list[Rest] = []
    for rest in sorted(choices, key=lambda rest: rest[:2]):
        if (cpu_bytes is None or rest.cpu <= cpu_bytes) and (not lowest or rest.cpu < lowest[-1].cpu):
            lowest.append(rest)
    return lowest


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
    return floors(runs)[0][-1] if cpu_bytes is None else rests(runs, cpu_bytes)[0][-1][0].peak


def fewest_bytes(runs: Sequence[RunWays], cpu_bytes: int | None) -> list[Way]:
    """The choice with the lowest peak of all, in the order of the forward."""
    rest: Rest | None = rests(runs, cpu_bytes)[0][-1][0]
    chosen = []
    while rest is not None:
        chosen.append(rest.way)
        rest = rest.after
    return chosen
