"""The treatments that take the least time within a budget, exactly: counted, not tried one by one.

**Placement.** Swap two neighbouring treatments of a run, a before b in the forward, with k kept, w working, K held
before both. Only the two positions themselves change::

    a, b:  max(K + k_a + w_a,  K + k_a + k_b + w_b)
    b, a:  max(K + k_b + w_b,  K + k_a + k_b + w_a)

If w_a >= w_b, the first line is at most K + k_a + k_b + w_a, which the second line has as well. So the order of falling
working sets has the lowest peak of all orders: blocks that are recomputed come first, where little is held yet when
backward needs their working set, and the last blocks, freed first, are kept. Copies in flight are the same at all
positions, and time does not depend on the order within a run (``plan.predict_step``), so this order loses nothing: in
each run only *how many* blocks have which treatment is left to choose. What runs last must not move anything, which
the swap must respect: it is chosen apart, and the rest is in that order.

**Search.** Dynamic programming over runs, in a run over treatments by falling working set, and over the number of
blocks that have one. A state is a choice for some first blocks: time added, bytes kept, copies left to do, bytes in
CPU memory. It is dropped if

- the blocks that remain cannot fit in what it leaves (their lowest peak is known exactly);
- another state of the same blocks is as good: keeps no more, and is quicker even if it has to wait for all
  copies that it has left to do beyond the other's;
- even a relaxed rest takes it over the best time that is known (``plan.bounds``).

What a bound drops cannot be better than what is known, so the answer is the optimum. The bytes in flight are given, and
only choices that need all of them are looked for: ``plan.optimum`` goes through every value that can matter. Sixty
blocks of three kinds take some hundred thousand states at most; a model of many kinds in turn may take more than there
is time for, and the search stops.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lowtide.plan.bounds import Bounds
from lowtide.plan.fewest import floors
from lowtide.plan.ways import RunWays, State, Way

MOST_STATES = 250_000
MOST_LIMITED = 30_000
"""The same where CPU memory is limited: there are more figures to compare, so each state takes longer."""

_CLOSE = 1e-9
_FEW = (5, 40)  # states a node
_FIGURES = itemgetter(0, 1, 2, 3)  # of a state


@dataclass
class Search:
    """The choices of every run, with the bytes in flight given.

    room_bytes: the budget, less residents and bytes in flight. cpu_bytes: how much may wait in CPU memory.
    start_ms: copies left at the beginning (``predict_step.lane_out``). bound_ms: what may be left from run to run.
    best_ms: added time that has to be beaten. most_states: how many to look at; stopped: whether there were more.
    """

    runs: Sequence[RunWays]
    in_flight_bytes: int
    room_bytes: int
    cpu_bytes: int | None
    start_ms: float
    bound_ms: float
    best_ms: float
    most_states: int
    states: int = 0
    stopped: bool = False
    best: State | None = None

    def __post_init__(self) -> None:
        self._floors = floors(self.runs)
        self._bounds = Bounds(self.runs, self.room_bytes, self.start_ms, self.bound_ms, self.cpu_bytes)

    def least_ms(self) -> float:
        """No choice adds less than this; infinite where none fits. Also finds the prices for ``run``."""
        return self._bounds.improve(self.best_ms) if self._floors[0][-1] <= self.room_bytes else math.inf

    def among_few(self) -> None:
        """Find a good choice that beats ``best_ms``, if there is one among the most promising states."""
        for most in _FEW:
            self._pass(most)

    def among_all(self) -> None:
        """Find the best choice, if one beats ``best_ms``, unless ``stopped``."""
        self._pass(None)

    def _pass(self, most: int | None) -> None:
        """most: states a node; None: all."""
        if not self._bounds.narrow(self._to_beat):
            return
        self.runs = self._bounds.runs
        if not any(way.in_flight == self.in_flight_bytes for run in self.runs for way in (*run.ways, *run.last_ways)):
            return  # fewer bytes in flight would do, and leave more room
        self._bounds.settle()
        alone = len(self.runs) == 1 or not self.in_flight_bytes  # no copies are left from run to run
        states = [State(0.0, 0, self.start_ms, 0, alone)]
        for number, run in enumerate(self.runs):
            last = number == len(self.runs) - 1
            nodes = self._through(number, run, states, most)
            if last:
                self._close(run, nodes)
            else:
                states = _pruned(self._end_of_run(state) for state in nodes[run.depth])

    def _through(self, number: int, run: RunWays, states: list[State], most: int | None) -> list[list[State]]:
        """States by the number of blocks of the run that they have chosen for."""
        nodes: list[list[State]] = [states, *([] for _ in range(run.depth))]
        for place, way in enumerate(run.ways):
            for blocks in range(run.depth - way.blocks + 1):
                if not nodes[blocks] or self.stopped:
                    continue
                nodes[blocks] = self._promising(number, place, run.depth - blocks, nodes[blocks], most)
                reached = blocks + way.blocks
                grown = self._grown(number, reached, nodes[blocks], way)
                if grown:
                    nodes[reached] = _pruned((*nodes[reached], *grown))
        return nodes

    def _grown(self, number: int, reached: int, states: list[State], way: Way) -> list[State]:
        """The states with one more treatment, ``reached`` blocks of the run in all, as far as they fit."""
        run, limited = self.runs[number], self.cpu_bytes is not None
        left = run.depth - reached
        least_out_ms = -left * run.most_out_ms  # below this, what is left to copy is all hidden
        most_kept = self.room_bytes - max(way.working, self._floor(number, left)) - way.kept
        most_cpu = self.cpu_bytes - way.cpu if self.cpu_bytes is not None else 0
        ms, kept, out_ms, cpu = way.ms, way.kept, way.out_ms, way.cpu if limited else 0
        needs_bound = way.in_flight == self.in_flight_bytes
        self.states += len(states)
        self.stopped = self.states > self.most_states
        return [
            State(s[0] + ms, s[1] + kept, max(s[2] + out_ms, least_out_ms), s[3] + cpu, s[4] or needs_bound, s, way)
            for s in states
            if s[1] <= most_kept and s[3] <= most_cpu
        ]

    def _floor(self, number: int, left: int) -> int:
        """The lowest peak of the blocks that remain, above what is kept."""
        if left or number == len(self.runs) - 1:
            return self._floors[number][left]
        return self._floors[number + 1][self.runs[number + 1].depth]

    def _promising(self, number: int, place: int, left: int, states: list[State], most: int | None) -> list[State]:
        bounded = self._bounds.below(number, place, left, states, self._to_beat)
        if most is not None and len(bounded) > most:
            bounded.sort(key=lambda entry: entry[0])
            del bounded[most:]
        return [state for _, state in bounded]

    @property
    def _to_beat(self) -> float:
        return self.best_ms - _CLOSE * (1 + self.best_ms)

    def _end_of_run(self, state: State) -> State:
        out_ms = max(0.0, state.out_ms)
        left_ms = min(out_ms, self.bound_ms)
        return state._replace(ms=state.ms + out_ms - left_ms, out_ms=left_ms)

    def _close(self, run: RunWays, nodes: list[list[State]]) -> None:
        """Choose what runs last, and wait for all copies."""
        for way in run.last_ways:
            for state in nodes[run.depth - way.blocks]:
                kept = state.kept + way.kept
                needs_bound = state.needs_bound or way.in_flight == self.in_flight_bytes
                if kept + way.working > self.room_bytes or not needs_bound:
                    continue
                ms = state.ms + way.ms + max(0.0, state.out_ms + way.out_ms)
                if ms < self._to_beat:
                    self.best_ms = ms
                    self.best = State(ms, kept, 0.0, state.cpu, True, state, way)


def _pruned(states: Iterable[State]) -> list[State]:
    """Without states that another one makes useless: one that is as quick with and without the copies left to do, and
    keeps no more, on the device and in CPU memory."""
    kept: list[State] = []
    fronts: dict[tuple[int, bool], _Front] = {}
    for state in sorted(states, key=_FIGURES):
        _, bytes_kept, out_ms, cpu, needs_bound = state[:5]
        later_ms = state.ms + out_ms
        if not any(
            other <= cpu and bound >= needs_bound and front.has(bytes_kept, later_ms)
            for (other, bound), front in fronts.items()
        ):
            fronts.setdefault((cpu, needs_bound), _Front()).add(bytes_kept, later_ms)
            kept.append(state)
    return kept


class _Front:
    """Pairs of which none is at least as good as another in both: the one rises, the other falls."""

    def __init__(self) -> None:
        self._rising: list[int] = []
        self._falling: list[float] = []

    def has(self, rising: int, falling: float) -> bool:
        """Whether a pair is at least as good as this one."""
        place = bisect.bisect_right(self._rising, rising)
        return place > 0 and self._falling[place - 1] <= falling

    def add(self, rising: int, falling: float) -> None:
        start = bisect.bisect_left(self._rising, rising)
        end = start
        while end < len(self._rising) and self._falling[end] >= falling:
            end += 1
        self._rising[start:end] = [rising]
        self._falling[start:end] = [falling]


def ways_of(state: State | None) -> Iterator[Way]:
    """The choices that led to a state, the last one first."""
    while state is not None:
        if state.way is not None:
            yield state.way
        state = state.last
