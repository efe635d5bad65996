"""What can be chosen for each run of like blocks, in the figures that the search adds up."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowtide.plan.assignment import in_flight_bytes_for
from lowtide.plan.costs import Run, StepCosts, TreatmentCost
from lowtide.plan.predict_step import exposed_back_ms, net_out_ms


class Way(NamedTuple):
    """One treatment. ms: time added, waits for what comes back included. kept, working, cpu: bytes.

    out_ms: copies out less computation in forward.
    """

    cost: TreatmentCost
    blocks: int
    ms: float
    kept: int
    working: int
    out_ms: float
    cpu: int


class RunWays(NamedTuple):
    """depth: blocks of the run. ways: by falling working set. last_ways: what may run last; only of the last run."""

    depth: int
    ways: tuple[Way, ...]
    last_ways: tuple[Way, ...]


def ways_of_runs(costs: StepCosts, in_flight_bytes: int) -> tuple[RunWays, ...]:
    """Every choice that copies at most ``in_flight_bytes`` at once, without those that others make useless."""
    return tuple(_ways_of(costs, run, in_flight_bytes, run is costs.runs[-1]) for run in costs.runs)


def _ways_of(costs: StepCosts, run: Run, in_flight_bytes: int, last: bool) -> RunWays:
    able = [
        _way(costs, run, cost, in_flight_bytes)
        for cost in costs.kinds[run.kind].treatments
        if in_flight_bytes_for(cost.copied_bytes) <= in_flight_bytes
        and cost.blocks <= run.depth
        and (costs.link or not cost.moves)
    ]
    ways = sorted(_useful(able), key=lambda way: (-way.working, way.kept))
    last_ways = tuple(_useful([way for way in able if not way.cost.moves])) if last else ()
    return RunWays(run.depth, tuple(ways), last_ways)


def _way(costs: StepCosts, run: Run, cost: TreatmentCost, in_flight_bytes: int) -> Way:
    ms = cost.extra_ms + exposed_back_ms(costs, run, cost)
    out_ms = net_out_ms(costs, run, cost) if in_flight_bytes else 0.0
    return Way(cost, cost.blocks, ms, cost.kept_bytes, cost.working_bytes, out_ms, cost.cpu_bytes)


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
