"""The best of all treatments of all blocks: one search for each number of bytes that may be in flight, best first."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from lowtide.plan.assignment import Assignment, in_flight_bytes_for
from lowtide.plan.costs import StepCosts, TreatmentCost
from lowtide.plan.fewest import fewest_bytes, lowest_peak
from lowtide.plan.linear import Tableau
from lowtide.plan.place import Room, placed
from lowtide.plan.predict_step import lane_out, net_out_ms, predict_step
from lowtide.plan.relaxed import Limits, Relaxed
from lowtide.plan.search import MOST_WORK, Search
from lowtide.plan.ways import RunWays, ways_of_runs

Found = TypeVar("Found")


@dataclass(frozen=True)
class Optimum:
    """assignment: None: none adds less than what had to be beaten.

    states: how many programs were solved. within_ms: 0 where this is proven to be the best; where the search
    was stopped, no choice is quicker by more than this.
    """

    assignment: Assignment | None
    states: int
    within_ms: float


def quickest(costs: StepCosts, budget_bytes: int, best_ms: float, most_work: int = MOST_WORK) -> Optimum:
    """The assignment within the budget that adds the least time, if that is less than ``best_ms``.

    most_work: see search.MOST_WORK.
    """
    search = Search(best_ms, most_work)

    def bounded(reaches_in: bool, least_bytes: int, most_bytes: int) -> tuple[float, tuple[Relaxed, Tableau] | None]:
        relaxed = _relaxed(costs, budget_bytes, least_bytes, most_bytes, reaches_in)
        if lowest_peak(relaxed.runs, None) > relaxed.limits.room_bytes:
            return math.inf, None
        tableau = search.solved(relaxed)
        return tableau.least, (relaxed, tableau)

    sizes = _in_flight_sizes(costs)
    parts = [_BestFirst(sizes, partial(bounded, reaches_in)) for reaches_in in (False, True)[: 1 + _may_wake(costs)]]
    while not search.stopped:
        part = min(parts, key=lambda part: part.bound)
        if min(part.bound, search.least_ms) >= search.to_beat_ms:
            break
        if search.least_ms <= part.bound:
            search.follow()
        elif (found := part.next()) is not None:
            search.add(*found)
    least_ms = min(search.least_ms, *(part.bound for part in parts))
    within_ms = max(0.0, search.best_ms - least_ms) if least_ms < search.to_beat_ms else 0.0
    return Optimum(None if search.best is None else _placed(costs, *search.best), search.states, within_ms)


def _may_wake(costs: StepCosts) -> bool:
    """Whether it matters if blocks are reached into: what runs last needs less room beside it then."""
    ways = [cost for kinds in costs.kinds.values() for cost in kinds.treatments]
    last = costs.kinds[costs.runs[-1].kind].treatments
    relieved = any(cost.relief_bytes for cost in last if not cost.moves)
    return costs.link is not None and relieved and any(cost.reaches_in for cost in ways)


def smallest(costs: StepCosts) -> Assignment:
    """The assignment with the lowest peak of all. (Where what runs last has a relief, so far as the one with the lowest
    peak under it reaches into blocks, which it is not made to.)"""
    found = [_smallest(costs, reaches_in) for reaches_in in (False, True)[: 1 + _may_wake(costs)]]
    return min(found, key=lambda assignment: predict_step(costs, assignment).peak_bytes)


def _smallest(costs: StepCosts, reaches_in: bool) -> Assignment:
    limit_bytes = _binding_host_limit(costs)

    def bounded(least_bytes: int, most_bytes: int) -> tuple[float, tuple[RunWays, ...]]:
        runs = ways_of_runs(costs, least_bytes, most_bytes, reaches_in)
        return costs.in_flight(least_bytes) + lowest_peak(runs, limit_bytes), runs

    sizes, runs = _BestFirst(_in_flight_sizes(costs), bounded), None
    while runs is None:
        runs = sizes.next()
    chosen = [way.cost for way in fewest_bytes(runs, limit_bytes)]
    return {name: tuple(_taken(chosen, len(kinds))) for name, kinds in costs.stacks.items()}


def _relaxed(costs: StepCosts, budget_bytes: int, least_bytes: int, most_bytes: int, reaches_in: bool) -> Relaxed:
    """For bytes in flight between two values: where they differ, it may promise too much."""
    lane = lane_out(costs, most_bytes)
    in_flight_bytes = costs.in_flight(least_bytes)
    room_bytes = budget_bytes - costs.resident_bytes - in_flight_bytes
    copied_bytes = most_bytes if least_bytes == most_bytes else 0
    lanes = lane.left_ms, lane.bound_ms
    limits = Limits(room_bytes, in_flight_bytes, _binding_host_limit(costs), *lanes, reaches_in, copied_bytes)
    return Relaxed(ways_of_runs(costs, least_bytes, most_bytes, reaches_in), limits)


class _BestFirst(Generic[Found]):
    """What is found for each size, by rising bounds.

    bounded: a bound for all sizes between two, and what is found there. So whole ranges of sizes wait together, and
    those that promise too little are never looked at one by one.
    """

    def __init__(self, sizes: Sequence[int], bounded: Callable[[int, int], tuple[float, Found]]) -> None:
        self._sizes, self._bounded = sizes, bounded
        self._heap: list[tuple[float, int, int, Found]] = []
        self._push(0, len(sizes) - 1)

    @property
    def bound(self) -> float:
        """Of what is left."""
        return self._heap[0][0] if self._heap else math.inf

    def next(self) -> Found | None:
        """What is found for the size of the lowest bound; None: it lies in a range, of which it is nearer now."""
        _, first, last, found = heapq.heappop(self._heap)
        if first == last:
            return found
        middle = (first + last) // 2
        self._push(first, middle)
        self._push(middle + 1, last)
        return None

    def _push(self, first: int, last: int) -> None:
        bound, found = self._bounded(self._sizes[first], self._sizes[last])
        heapq.heappush(self._heap, (bound, first, last, found))


def _in_flight_sizes(costs: StepCosts) -> list[int]:
    """Every number of bytes in flight that a schedule can have."""
    kinds = {kind for kinds in costs.stacks.values() for kind in kinds}
    sizes = {in_flight_bytes_for(cost.copied_bytes) for kind in kinds for cost in costs.kinds[kind].treatments}
    return sorted(sizes) if costs.link is not None else [0]


def _binding_host_limit(costs: StepCosts) -> int | None:
    """None where everything that can move fits in CPU memory."""
    most = {name: max(cost.cpu_bytes / cost.blocks for cost in kind.treatments) for name, kind in costs.kinds.items()}
    all_bytes = sum(most[kind] for kinds in costs.stacks.values() for kind in kinds)
    limit_bytes = costs.host_limit_bytes
    return limit_bytes if limit_bytes is not None and all_bytes > limit_bytes else None


def _placed(costs: StepCosts, relaxed: Relaxed, counts: Sequence[int]) -> Assignment:
    chosen = [way.cost for way in relaxed.ways(counts)]
    found: dict[str, tuple[TreatmentCost, ...]] = dict.fromkeys(costs.stacks, ())
    held_bytes = 0
    for run in costs.runs:
        treatments, last = _taken(chosen, run.depth), run is costs.runs[-1]
        crowded = any(cost.moves and net_out_ms(costs, run, cost) > 0 for cost in treatments)
        limits = relaxed.limits
        room = Room(limits.room_bytes, limits.in_flight_bytes, held_bytes, limits.reaches_in)
        ordered = placed(treatments, room, spread=crowded, last=last)
        held_bytes += sum(cost.net_bytes for cost in ordered)
        found[run.stack] = (*found[run.stack], *ordered)
    return found


def _taken(chosen: list[TreatmentCost], blocks: int) -> list[TreatmentCost]:
    """The first treatments, for so many blocks; they are taken off the list."""
    taken = []
    while blocks:
        taken.append(chosen.pop(0))
        blocks -= taken[-1].blocks
    return taken
