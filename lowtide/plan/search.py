"""The treatments that take the least time within a budget, exactly: counted, not tried one by one.

**Placement.** Swap two neighbouring treatments of a run, a before b in the forward, with k kept, w working, K held
before both. Only the two positions themselves change::

    a, b:  max(K + k_a + w_a,  K + k_a + k_b + w_b)
    b, a:  max(K + k_b + w_b,  K + k_a + k_b + w_a)

If w_a >= w_b, the first line is at most K + k_a + k_b + w_a, which the second line has as well. So the order of falling
working sets has the lowest peak of all orders: blocks that are recomputed come first, where little is held yet when
backward needs their working set, and the last blocks, freed first, are kept. (Where blocks have gradients that are not
there before their backward, these are taken off what is kept, so that k may be negative. Such blocks come before the
others, by rising k + w: backward comes to them when least is held. The rule is Johnson's of 1954, for two machines.)
All bytes in flight
count as many at all positions, where what needs no room beside a working set is taken off that one (``plan.ways``), and
time does not depend on the order within a run (``plan.predict_step``), so this order loses nothing: in each run only
*how many* blocks have which treatment is left to choose. What runs last must not move anything, which the swap must
respect: it is chosen apart, and the rest is in that order.

**Search.** Branch and bound (Land and Doig 1960) over these counts. With parts of blocks allowed, the least time is
that of a small linear program (``plan.relaxed``), which no schedule can beat. Where its answer has a part of a block,
one branch has at most as many whole ones, another at least one more. Where a choice is made that its working set
leaves no room for, one branch goes without it, in another its working set is one more limit. Branches that promise no
less than what is known are dropped; the one that promises most is followed down to a schedule, then the best of all
that are left. So when none is left, the answer is the optimum, and when the search is stopped, the best promise says
how much quicker another schedule can be. Sixty blocks of three kinds take some hundred programs, of a third of a
millisecond each; a model of many kinds in turn may take more than there is time for.

The bytes in flight are given to a program: ``plan.optimum`` has one for every value that can matter.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from lowtide.plan.linear import Tableau
from lowtide.plan.relaxed import Relaxed

MOST_WORK = 250_000
"""Of tableaus, see ``linear.Tableau.work``: about a second."""

_MOST_CROWDED = 20
_CLOSE = 1e-9
_WAYS = 3  # to part a branch, of which the best is taken
_WHOLE = 1e-6  # a count that close to a whole number is one


class Cut(NamedTuple):
    """How many blocks, or segments, have one choice: at most, or at least, so many."""

    column: int
    at_most: bool
    count: int

    @property
    def chooses(self) -> bool:
        """Whether some block has the choice for certain."""
        return not self.at_most and self.count > 0


class Branch(NamedTuple):
    """Some of the choices of a program. tableau: of the program without the cuts."""

    relaxed: Relaxed
    tableau: Tableau
    cuts: tuple[Cut, ...] = ()


class Part(NamedTuple):
    """Of a branch. tableau: with the cuts."""

    cuts: tuple[Cut, ...]
    tableau: Tableau


class Search:
    """Branches that are still to be followed. best_ms: the time to be beaten.

    most_work: figures to compute before it is stopped. work: how many were. states: programs solved. best: what was
    found, and takes best_ms: the program, and how many have each choice.
    """

    def __init__(self, best_ms: float, most_work: int = MOST_WORK) -> None:
        self.best_ms = best_ms
        self.most_work = most_work
        self.work = 0
        self.states = 0
        self.best: tuple[Relaxed, tuple[int, ...]] | None = None
        self._open: list[tuple[float, int, Branch]] = []
        self._number = count()

    @property
    def least_ms(self) -> float:
        """No branch that is left takes less."""
        return self._open[0][0] if self._open else math.inf

    @property
    def to_beat_ms(self) -> float:
        return self.best_ms - _CLOSE * (1 + self.best_ms)

    @property
    def stopped(self) -> bool:
        return self.work >= self.most_work

    def solved(self, relaxed: Relaxed) -> Tableau:
        return self._counted(Tableau(relaxed.program()))

    def add(self, relaxed: Relaxed, tableau: Tableau) -> None:
        """Look into a program too, as far as it may beat what is known."""
        slack_ms = self.to_beat_ms - tableau.least
        narrow = relaxed.without({c for c in range(len(relaxed.choices)) if tableau.slopes[c] > slack_ms})
        tableau = self.solved(narrow)
        for _ in range(_MOST_CROWDED):
            crowded = narrow.crowded(tableau.values()) if tableau.least < self.to_beat_ms else None
            if crowded is None:
                break
            tableau = self._counted(tableau.limited(*crowded))
        self._push(Branch(narrow, tableau), tableau.least)

    def follow(self) -> None:
        """Follow the branch that promises most down to a schedule, or until it promises too little."""
        branch = heapq.heappop(self._open)[2]
        tableau = branch.tableau
        for number in range(len(branch.cuts)):
            tableau = self._limited(branch.relaxed, tableau, branch.cuts[:number], branch.cuts[number : number + 1])
        while tableau.least < self.to_beat_ms:
            ways = _ways_to_part(branch, tableau)
            if not ways:
                self.best_ms, self.best = tableau.least, (branch.relaxed, _whole(branch, tableau))
                return
            parts = self._best_parted(branch, tableau, ways)
            goes_on = bool(parts) and (self.best is None or not self.stopped)
            for part in parts[1:] if goes_on else parts:
                self._push(branch._replace(cuts=part.cuts), part.tableau.least)
            if not goes_on:
                return
            branch, tableau = branch._replace(cuts=parts[0].cuts), parts[0].tableau

    def _best_parted(self, branch: Branch, tableau: Tableau, ways: Sequence[Sequence[tuple[Cut, ...]]]) -> list["Part"]:
        """The parts of a branch, the one that promises most first: parted in the way that leaves the least to hope for.

        Until a schedule is known, the first way will do.
        """
        most, found = -math.inf, []
        for cuts in ways[: _WAYS if self.best is not None else 1]:
            parts = [
                Part((*branch.cuts, *new), self._limited(branch.relaxed, tableau, branch.cuts, new)) for new in cuts
            ]
            rises = [min(part.tableau.least, self.best_ms) - tableau.least + _CLOSE for part in parts]
            if math.prod(rises) > most:
                most, found = math.prod(rises), parts
        return sorted(found, key=lambda part: part.tableau.least)

    def _push(self, branch: Branch, least_ms: float) -> None:
        if least_ms < self.to_beat_ms:
            heapq.heappush(self._open, (least_ms, next(self._number), branch))

    def _limited(self, relaxed: Relaxed, tableau: Tableau, known: Sequence[Cut], cuts: Sequence[Cut]) -> Tableau:
        for cut in cuts:
            sign = 1 if cut.at_most else -1
            tableau = self._counted(tableau.limited({cut.column: sign}, sign * cut.count))
            chosen = {other.column for other in known if other.chooses}
            if cut.chooses and cut.column not in chosen and not relaxed.choices[cut.column].last:
                tableau = self._counted(tableau.limited(*relaxed.up_to(cut.column)))
        return tableau

    def _counted(self, tableau: Tableau) -> Tableau:
        self.states += 1
        self.work += tableau.work
        return tableau


def _ways_to_part(branch: Branch, tableau: Tableau) -> list[list[tuple[Cut, ...]]]:
    """Each as the cuts that lead to each part; none where the answer is a schedule. The first is most promising."""
    values = tableau.values()
    columns = range(len(branch.relaxed.choices))
    parts = {column: values[column] % 1 for column in columns if column in values}
    broken = [column for column, part in parts.items() if _WHOLE < part < 1 - _WHOLE]
    if broken:
        broken.sort(key=lambda column: abs(parts[column] - 0.5))
        return [_around(column, math.floor(values[column])) for column in broken]
    counts = _whole(branch, tableau)
    beyond = branch.relaxed.first_beyond(counts)
    chosen = {cut.column for cut in branch.cuts if cut.chooses}
    if beyond is not None and beyond not in chosen and not branch.relaxed.choices[beyond].last:
        return [_around(beyond, 0)]
    return [] if branch.relaxed.fits(counts) else [_rounded(branch, counts)]


def _around(column: int, count: int) -> list[tuple[Cut, ...]]:
    return [(Cut(column, True, count),), (Cut(column, False, count + 1),)]


def _rounded(branch: Branch, counts: Sequence[int]) -> list[tuple[Cut, ...]]:
    """Of an answer that fits but for rounding: all others."""
    for column, number in enumerate(counts):
        same = Cut(column, True, number), Cut(column, False, number)
        if not set(same) <= set(branch.cuts):
            below = [(Cut(column, True, number - 1),)] if number else []
            return [*below, (Cut(column, False, number + 1),), same]
    return []


def _whole(branch: Branch, tableau: Tableau) -> tuple[int, ...]:
    values = tableau.values()
    return tuple(round(values.get(column, 0.0)) for column in range(len(branch.relaxed.choices)))
