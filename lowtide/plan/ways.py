"""What can be chosen for each run of like blocks, in the figures that the search adds up."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowtide.plan.assignment import in_flight_bytes_for
from lowtide.plan.costs import Run, StepCosts, TreatmentCost
from lowtide.plan.predict_step import exposed_back_ms, net_out_ms

_TIE_MS = 1e-14
"""A byte that is copied, so that of plans that take as long the one that copies less is found."""


class Way(NamedTuple):
    """One treatment. ms: time added, waits for what comes back included. kept, working, cpu: bytes.

    kept: see TreatmentCost.net_bytes. working: without room for all that is in flight, which programs take from the
    budget beforehand; so it is less where not all of it needs room. out_ms: copies out less computation in forward.
    """

    cost: TreatmentCost
    blocks: int
    ms: float
    kept: int
    working: int
    out_ms: float
    cpu: int


class RunWays(NamedTuple):
    """depth: blocks of the run. ways: in the best order. last_ways: what may run last; only of the last run."""

    depth: int
    ways: tuple[Way, ...]
    last_ways: tuple[Way, ...]


def ways_of_runs(costs: StepCosts, least_bytes: int, most_bytes: int, reaches_in: bool = False) -> tuple[RunWays, ...]:
    """Every choice that copies at most ``most_bytes`` at once, without those that others make useless.

    least_bytes: how much may be in flight at least. reaches_in: some block is reached into, so what runs last wakes the
    way back at its attention.
    """
    return tuple(_ways_of(costs, run, least_bytes, most_bytes, reaches_in) for run in costs.runs)


def _ways_of(costs: StepCosts, run: Run, least_bytes: int, most_bytes: int, reaches_in: bool) -> RunWays:
    able = [
        cost
        for cost in costs.kinds[run.kind].treatments
        if in_flight_bytes_for(cost.copied_bytes) <= most_bytes
        and cost.blocks <= run.depth
        and (costs.link or not cost.moves)
    ]
    crowd = _Crowd(costs, run, costs.in_flight(least_bytes), most_bytes > 0)

    def demanded(way: Way) -> tuple[bool, bool]:
        """What else a choice may be made for: so that blocks are reached into, or so much may be in flight."""
        return reaches_in and way.cost.reaches_in, in_flight_bytes_for(way.cost.copied_bytes) == most_bytes

    groups: dict[tuple[bool, bool], list[Way]] = {}
    for way in (crowd.way(cost, wakes=False) for cost in able):
        groups.setdefault(demanded(way), []).append(way)
    useful = (way for group in groups.values() for way in _useful(group))
    ways = sorted(useful, key=lambda way: best_first(way.kept, way.working))
    staying = [crowd.way(cost, reaches_in) for cost in able if not cost.moves] if run is costs.runs[-1] else []
    return RunWays(run.depth, tuple(ways), tuple(_useful(staying)))


class _Crowd(NamedTuple):
    """What choices are beside. in_flight_bytes: what counts of the bytes in flight. moves: whether anything may."""

    costs: StepCosts
    run: Run
    in_flight_bytes: int
    moves: bool

    def way(self, cost: TreatmentCost, wakes: bool) -> Way:
        ms = cost.extra_ms + exposed_back_ms(self.costs, self.run, cost) + _TIE_MS * cost.copied_bytes
        out_ms = net_out_ms(self.costs, self.run, cost) if self.moves else 0.0
        working = working_beside(cost, self.in_flight_bytes, wakes)
        return Way(cost, cost.blocks, ms, cost.net_bytes, working, out_ms, cost.cpu_bytes)


def working_beside(cost: TreatmentCost, in_flight_bytes: int, wakes: bool = False) -> int:
    """The working set, where so many bytes in flight have room already."""
    return cost.at_work_bytes + cost.in_flight(in_flight_bytes, wakes) - in_flight_bytes


def best_first(kept: int, working: int) -> tuple[int, int, int]:
    """The order in which treatments of a run have the lowest peak: plan.search says why."""
    return (0, kept + working, kept) if kept < 0 else (1, -working, kept)


def _useful(ways: Sequence[Way]) -> Iterator[Way]:
    """Without those than which another is as good in everything; of equals, the first stays."""
    for place, way in enumerate(ways):
        others = ((number, other) for number, other in enumerate(ways) if other.blocks == way.blocks)
        if not any(number != place and _replaces(other, way, number < place) for number, other in others):
            yield way


def _replaces(other: Way, way: Way, comes_first: bool) -> bool:
    """Whether a choice loses nothing by the exchange, however long its copies may have to be waited for."""
    figures, those = ((w.kept, w.working, w.cpu) for w in (other, way))
    ms = other.ms - way.ms + max(0.0, other.out_ms - way.out_ms)
    if ms > 0 or any(figure > that for figure, that in zip(figures, those, strict=True)):
        return False
    return comes_first or (other.ms, other.out_ms, *figures) != (way.ms, way.out_ms, *those)
