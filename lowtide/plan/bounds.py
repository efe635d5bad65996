"""How little time the blocks that remain can add: lower bounds for the search, from priced constraints.

A constraint is priced instead of imposed: a byte that is held at the end of a run costs that run's ``memory`` ms, a
byte in CPU memory, where that is limited, costs ``cpu`` ms, and a ms of copies out that a run cannot hide a price
between 0 and 1. What is left is one minimum for each block.
Where the price of copies goes down from one run to the next, copies could be left to that next run; as at most the
bytes in flight can be, so much is taken off the bound. Any prices from 0 on give a bound (Lagrangian relaxation,
Geoffrion 1974); good ones are found by following what the relaxed choice has too much of (Polyak 1969).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lowtide.plan.ways import RunWays, State, Way

_STEPS = 120
_PATIENCE = 6  # steps without a better bound, before they get shorter
_AROUND = (0.5, 0.8, 1.0, 1.25, 2.0)


class Prices(NamedTuple):
    """By run. memory: ms a byte held at its end. out: ms a ms of copies that is not hidden. cpu: ms a byte, of all."""

    memory: tuple[float, ...]
    out: tuple[float, ...]
    cpu: float = 0.0


class _Priced(NamedTuple):
    """Prices as one run sees them: a byte kept in it is held at the end of all runs from it on."""

    kept: float
    working: float
    out: float
    cpu: float

    def of(self, way: Way) -> float:
        return way.ms + self.kept * way.kept + self.out * way.out_ms + self.cpu * way.cpu


class _Table(NamedTuple):
    """Of one run: rests by place of the first treatment that may still be used, and number of blocks that remain."""

    priced: _Priced
    constant: float
    rests: list[list[float]]


class Bounds:
    """For one search; see search.Search for the arguments."""

    def __init__(
        self, runs: Sequence[RunWays], room_bytes: int, start_ms: float, bound_ms: float, cpu_bytes: int | None
    ) -> None:
        self.runs = runs
        self._cpu_bytes = cpu_bytes
        self._room_bytes = room_bytes
        self._start_ms = start_ms
        self._bound_ms = bound_ms
        self._tables: list[list[_Table]] = []
        free = (0.0,) * len(runs)
        self._best = Prices(free, free)

    # ------------------------------------------------------------------ prices

    def improve(self, target_ms: float) -> float:
        """Find good prices; returns the bound for all blocks with them. target_ms: a bound above it is good enough."""
        prices, best_ms, share, since = self._best, -math.inf, 1.0, 0
        scale = target_ms / max(1, self._room_bytes)
        for _ in range(_STEPS):
            ms, slopes = self._whole(prices)
            since += 1
            if ms > best_ms:
                self._best, best_ms, since = prices, ms, 0
            if ms >= target_ms:
                break
            if since >= _PATIENCE:
                prices, share, since = self._best, share / 2, 0
                ms, slopes = self._whole(prices)
            moved = _moved(prices, slopes, scale, share * (target_ms - ms))
            if moved == prices:
                break
            prices = moved
        return best_ms

    def _whole(self, prices: Prices) -> tuple[float, Prices]:
        """The bound for all blocks, and its slopes in the prices: what the relaxed choice has too much of."""
        priced = self._seen_by_runs(prices)
        chosen: list[list[Way]] = []
        rest_ms = 0.0
        for run, seen in zip(reversed(self.runs), reversed(priced), strict=True):
            rest_ms, ways = _relaxed(run, seen, rest_ms)
            chosen.append(ways)
        chosen.reverse()
        held = accumulate(sum(way.kept for way in ways) for ways in chosen)
        memory = tuple(kept + ways[-1].working - self._room_bytes for kept, ways in zip(held, chosen, strict=True))
        out = self._out_slopes(prices.out, [sum(way.out_ms for way in ways) for ways in chosen])
        ms = rest_ms + prices.out[0] * self._start_ms + self._constant(prices, 0)
        if self._cpu_bytes is None:
            return ms, Prices(memory, out)
        return ms, Prices(memory, out, float(sum(way.cpu for ways in chosen for way in ways) - self._cpu_bytes))

    def _out_slopes(self, shares: Sequence[float], net_ms: list[float]) -> tuple[float, ...]:
        net_ms[0] += self._start_ms
        for run in range(len(shares) - 1):
            if shares[run] > shares[run + 1]:
                net_ms[run] -= self._bound_ms
                net_ms[run + 1] += self._bound_ms
        return tuple(net_ms)

    def _seen_by_runs(self, prices: Prices) -> list[_Priced]:
        kept = list(accumulate(reversed(prices.memory)))[::-1]
        return [_Priced(*seen, prices.cpu) for seen in zip(kept, prices.memory, prices.out, strict=True)]

    def _constant(self, prices: Prices, number: int) -> float:
        """Of a rest from this run on: the room, on the device and in CPU memory, and what leaving copies to runs with
        lower prices may save."""
        falls = sum(max(0.0, share - after) for share, after in pairwise(prices.out[number:]))
        room = sum(prices.memory[number:]) * self._room_bytes + prices.cpu * (self._cpu_bytes or 0)
        return -falls * self._bound_ms - room

    def narrow(self, most_ms: float) -> bool:
        """Take out the ways that no choice of less than ``most_ms`` can use, not even once. False: there is none."""
        ms, _ = self._whole(self._best)
        if ms >= most_ms:
            return False
        narrowed = []
        for run, seen in zip(self.runs, self._seen_by_runs(self._best), strict=True):
            rests = _rests(run, seen, 0.0)[0]
            slack_ms = most_ms - ms + rests[run.depth]
            once = _with_once(run, seen, rests)
            ways = tuple(way for way, ms in zip(run.ways, once, strict=True) if ms < slack_ms)
            narrowed.append(run._replace(ways=ways))
            if _rests(narrowed[-1], seen, 0.0)[0][run.depth] == math.inf:
                return False
        self.runs = tuple(narrowed)
        return True

    # ------------------------------------------------------------------ states

    def settle(self) -> None:
        """Make the tables that ``below`` reads."""
        self._tables = [[] for _ in self.runs]
        for factor in _AROUND:
            prices = self._best._replace(memory=tuple(factor * price for price in self._best.memory))
            after = 0.0
            for number, seen in reversed(list(enumerate(self._seen_by_runs(prices)))):
                rests = _rests(self.runs[number], seen, after)
                self._tables[number].append(_Table(seen, self._constant(prices, number), rests))
                after = rests[0][-1]

    def below(
        self, number: int, place: int, left: int, states: Iterable[State], most_ms: float
    ) -> list[tuple[float, State]]:
        """The states that may come to less than ``most_ms``, each with its bound.

        place: of the first treatment of the run that they may still use. left: blocks of the run that remain.
        """
        tables = [
            (table.priced.kept, table.priced.out, table.priced.cpu, table.constant + table.rests[place][left])
            for table in self._tables[number]
        ]
        found = []
        for state in states:
            ms, kept, out_ms, cpu = state[:4]
            rests = [memory * kept + out * out_ms + price * cpu + constant for memory, out, price, constant in tables]
            bound_ms = ms + max(rests)
            if bound_ms < most_ms:
                found.append((bound_ms, state))
        return found


def _moved(prices: Prices, slopes: Prices, scale: float, gap_ms: float) -> Prices:
    """A step along the slopes that would close the gap if they went on. scale: what a price of memory is like."""
    memory, cpu = [slope * scale for slope in slopes.memory], slopes.cpu * scale
    square = sum(slope * slope for slope in (*memory, *slopes.out, cpu))
    step = gap_ms / square if square else 0.0
    return Prices(
        tuple(max(0.0, price + step * scale * slope) for price, slope in zip(prices.memory, memory, strict=True)),
        tuple(min(1.0, max(0.0, price + step * slope)) for price, slope in zip(prices.out, slopes.out, strict=True)),
        max(0.0, prices.cpu + step * scale * cpu),
    )


def _closing(run: RunWays, seen: _Priced, ways: Sequence[Way]) -> list[tuple[float, Way]]:
    """What may end the run, whose working set is held then as well."""
    return [(seen.of(way) + seen.working * way.working, way) for way in run.last_ways or ways]


def _relaxed(run: RunWays, seen: _Priced, after_ms: float) -> tuple[float, list[Way]]:
    """The cheapest choice for a run at given prices, with what comes after it; what ends the run is the last of it."""
    priced = [(seen.of(way), way) for way in run.ways]
    cheapest = {way.blocks: (ms, way) for ms, way in sorted(priced, key=_ms, reverse=True)}
    ends = {way.blocks: (ms, way) for ms, way in sorted(_closing(run, seen, run.ways), key=_ms, reverse=True)}
    rests: list[tuple[float, Way | None]] = [(math.inf, None)]
    for left in range(1, run.depth + 1):
        least_ms, chosen = ends.get(left, (math.inf, None))
        for blocks, (ms, way) in cheapest.items():
            if blocks < left and ms + rests[left - blocks][0] < least_ms:
                least_ms, chosen = ms + rests[left - blocks][0], way
        rests.append((least_ms, chosen))
    return rests[-1][0] + after_ms, list(_followed(rests))


def _with_once(run: RunWays, seen: _Priced, rests: Sequence[float]) -> Iterable[float]:
    """For each way, the cheapest choice for the run that uses it, at its end or before."""
    filled = [0.0]
    for left in range(1, run.depth + 1):
        going_on = (seen.of(way) + filled[left - way.blocks] for way in run.ways if way.blocks <= left)
        filled.append(min(going_on, default=math.inf))
    for way in run.ways:
        left = run.depth - way.blocks
        at_the_end = math.inf if run.last_ways else seen.working * way.working + filled[left]
        yield seen.of(way) + min(rests[left], at_the_end)


def _ms(entry: tuple[float, Way]) -> float:
    return entry[0]


def _followed(rests: Sequence[tuple[float, Way | None]]) -> Iterable[Way]:
    left = len(rests) - 1
    while left:
        way = rests[left][1]
        assert way is not None
        yield way
        left -= way.blocks


def _rests(run: RunWays, seen: _Priced, after_ms: float) -> list[list[float]]:
    """See _Table. No way is left after the last one, except those that may run last of all."""
    rests = [[math.inf] * (run.depth + 1)]
    for ms, way in _closing(run, seen, ()):
        rests[0][way.blocks] = min(rests[0][way.blocks], ms)
    for way in reversed(run.ways):
        ms, row = seen.of(way), list(rests[0])
        if not run.last_ways:
            row[way.blocks] = min(row[way.blocks], ms + seen.working * way.working + after_ms)
        for left in range(way.blocks + 1, run.depth + 1):
            row[left] = min(row[left], ms + row[left - way.blocks])
        rests.insert(0, row)
    return rests
