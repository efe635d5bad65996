"""The best of all treatments of all blocks: one search for each number of bytes that may be in flight, best first."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lowtide.plan.assignment import Assignment, in_flight_bytes_for
from lowtide.plan.costs import StepCosts, TreatmentCost
from lowtide.plan.fewest import fewest_bytes, lowest_peak
from lowtide.plan.place import placed
from lowtide.plan.predict_step import lane_out, net_out_ms
from lowtide.plan.search import MOST_LIMITED, MOST_STATES, Search, ways_of
from lowtide.plan.ways import RunWays, ways_of_runs

Found = TypeVar("Found")


@dataclass(frozen=True)
class Optimum:
    """assignment: None: none adds less than what had to be beaten.

    states: how many partial choices were looked at. within_ms: 0 where this is proven to be the best; where the search
    was stopped, no choice is quicker by more than this.
    """

    assignment: Assignment | None
    states: int
    within_ms: float


def quickest(costs: StepCosts, budget_bytes: int, best_ms: float, most_states: int = MOST_STATES) -> Optimum:
    """The assignment within the budget that adds the least time, if that is less than ``best_ms``.

    most_states: at which the searches are stopped, but for a first look at each.
    """
    if _binding_host_limit(costs) is not None:
        most_states = min(most_states, MOST_LIMITED)
    found: Search | None = None
    searches: list[tuple[float, Search]] = []

    def bounded(least_bytes: int, most_bytes: int) -> tuple[float, Search]:
        search = _search(costs, budget_bytes, least_bytes, most_bytes, best_ms, most_states)
        return search.least_ms(), search

    for least_ms, search in _best_first(_in_flight_sizes(costs), bounded):
        if least_ms >= best_ms:
            break
        searches.append((least_ms, search))
        search.best_ms = best_ms
        search.among_few()
        if search.best_ms < best_ms:
            best_ms, found = search.best_ms, search
    for least_ms, search in searches:
        if least_ms < best_ms:
            used = sum(other.states for _, other in searches)
            search.best_ms, search.most_states = best_ms, search.states + max(0, most_states - used)
            search.among_all()
            if search.best_ms < best_ms:
                best_ms, found = search.best_ms, search
    within_ms = max((best_ms - least_ms for least_ms, search in searches if search.stopped), default=0.0)
    assignment = _placed(costs, found) if found is not None else None
    return Optimum(assignment, sum(search.states for _, search in searches), max(0.0, within_ms))


def smallest(costs: StepCosts) -> Assignment:
    """The assignment with the lowest peak of all."""
    limit_bytes = _binding_host_limit(costs)

    def bounded(least_bytes: int, most_bytes: int) -> tuple[float, tuple[RunWays, ...]]:
        runs = ways_of_runs(costs, most_bytes)
        return least_bytes + lowest_peak(runs, limit_bytes), runs

    _, runs = next(_best_first(_in_flight_sizes(costs), bounded))
    chosen = [way.cost for way in fewest_bytes(runs, limit_bytes)]
    return {name: tuple(_taken(chosen, len(kinds))) for name, kinds in costs.stacks.items()}


def _search(
    costs: StepCosts, budget_bytes: int, least_bytes: int, most_bytes: int, best_ms: float, most_states: int
) -> Search:
    """A search whose bytes in flight lie between two values: where they differ, one that may promise too much."""
    lane = lane_out(costs, most_bytes)
    return Search(
        runs=ways_of_runs(costs, most_bytes),
        in_flight_bytes=most_bytes,
        room_bytes=budget_bytes - costs.resident_bytes - least_bytes,
        cpu_bytes=_binding_host_limit(costs),
        start_ms=lane.left_ms,
        bound_ms=lane.bound_ms,
        best_ms=best_ms,
        most_states=most_states,
    )


def _best_first(
    sizes: Sequence[int], bounded: Callable[[int, int], tuple[float, Found]]
) -> Iterator[tuple[float, Found]]:
    """What is found for each size, by rising bounds.

    bounded: a bound for all sizes between two, and what is found there. So whole ranges of sizes wait together, and
    those that promise too little are never looked at one by one.
    """
    heap: list[tuple[float, int, int, Found]] = []

    def push(first: int, last: int) -> None:
        bound, found = bounded(sizes[first], sizes[last])
        heapq.heappush(heap, (bound, first, last, found))

    push(0, len(sizes) - 1)
    while heap:
        bound, first, last, found = heapq.heappop(heap)
        if first == last:
            yield bound, found
        else:
            middle = (first + last) // 2
            push(first, middle)
            push(middle + 1, last)


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


def _placed(costs: StepCosts, search: Search) -> Assignment:
    chosen = [way.cost for way in ways_of(search.best)][::-1]
    found: dict[str, tuple[TreatmentCost, ...]] = dict.fromkeys(costs.stacks, ())
    held_bytes = 0
    for run in costs.runs:
        treatments, last = _taken(chosen, run.depth), run is costs.runs[-1]
        crowded = any(cost.moves and net_out_ms(costs, run, cost) > 0 for cost in treatments)
        ordered = placed(treatments, search.room_bytes, held_bytes, spread=crowded, last=last)
        held_bytes += sum(cost.kept_bytes for cost in ordered)
        found[run.stack] = (*found[run.stack], *ordered)
    return found


def _taken(chosen: list[TreatmentCost], blocks: int) -> list[TreatmentCost]:
    """The first treatments, for so many blocks; they are taken off the list."""
    taken = []
    while blocks:
        taken.append(chosen.pop(0))
        blocks -= taken[-1].blocks
    return taken
