"""The choice of treatments with parts of blocks allowed: a linear program, whose least sum no schedule can beat."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lowtide.plan.assignment import in_flight_bytes_for
from lowtide.plan.linear import Program
from lowtide.plan.ways import RunWays, Way

_CLOSE = 1e-6


class Choice(NamedTuple):
    """One way to treat blocks of a run. last: it is what runs last of all, of which there is one."""

    run: int
    way: Way
    last: bool


@dataclass(frozen=True)
class Limits:
    """room_bytes: the budget, less residents and in_flight_bytes. cpu_bytes: how much may wait in CPU memory; None: no
    limit. start_ms: copies left at the beginning (``predict_step.lane_out``). bound_ms: what may be left from run to
    run. reaches_in: some block has to be reached into. copied_bytes: some block has to copy so much that this many
    bytes may be in flight; 0: none has to."""

    room_bytes: int
    in_flight_bytes: int
    cpu_bytes: int | None
    start_ms: float
    bound_ms: float
    reaches_in: bool = False
    copied_bytes: int = 0


@dataclass(frozen=True)
class Relaxed:
    """Rows of the program, of n runs: the blocks of each; what is held at the end of each, the smallest working set
    included; its copies; bytes in CPU memory; what runs last; copies left from each run but the last to the next; what
    is demanded of some block. Bytes are in parts of their limits, or of what is missing.

    Working sets in the midst of a run are limited only where a choice is known to be made (``up_to``).
    """

    runs: Sequence[RunWays]
    limits: Limits

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The columns of the program that stand for blocks. In each run in the best order, what runs last last."""
        return tuple(
            Choice(number, way, last)
            for number, run in enumerate(self.runs)
            for last, ways in ((False, run.ways), (True, run.last_ways))
            for way in ways
        )

    def program(self) -> Program:
        count, limits = len(self.runs), self.limits
        costs, columns = [choice.way.ms for choice in self.choices], [self._taken(choice) for choice in self.choices]
        for row in range(2 * count, 3 * count):
            costs.append(1.0)
            columns.append({row: -1.0})  # waited for
        for number in range(count - 1):
            row = 2 * count + number
            costs.append(0.0)
            columns.append({row: -1.0, row + 1: 1.0, 3 * count + 2 + number: 1.0})  # left to the next run
        held = [self._room - self._least_working(run) / self._unit_bytes for run in self.runs[:-1]]
        copies = [-limits.start_ms, *[0.0] * (count - 1)]
        rows = [
            *(float(run.depth) for run in self.runs),
            *held,
            self._room,
            *copies,
            1.0,
            1.0,
            *[limits.bound_ms] * (count - 1),
        ]
        for demanded in self._demands:
            for column in demanded:
                columns[column][len(rows)] = -1.0
            rows.append(-1.0)
        return Program(costs, columns, rows, frozenset((*range(count), 3 * count + 1)))

    @cached_property
    def _demands(self) -> Sequence[Sequence[int]]:
        """Of each at least one has to be chosen."""
        reaching, size = self.limits.reaches_in, self.limits.copied_bytes
        ways = [choice.way.cost for choice in self.choices]
        return [
            *([[n for n, cost in enumerate(ways) if cost.reaches_in]] if reaching else []),
            *([[n for n, cost in enumerate(ways) if in_flight_bytes_for(cost.copied_bytes) == size]] if size else []),
        ]

    @property
    def _unit_bytes(self) -> int:
        """That a program counts in, so that its figures are near 1."""
        return max(1, abs(self.limits.room_bytes))

    @property
    def _room(self) -> float:
        """None, or below 0, where gradients that are not there yet leave theirs."""
        return self.limits.room_bytes / self._unit_bytes

    def _least_working(self, run: RunWays) -> int:
        return min((way.working for way in run.ways), default=0)

    def _taken(self, choice: Choice) -> dict[int, float]:
        number, way, last = choice
        count, cpu_bytes = len(self.runs), self.limits.cpu_bytes
        taken = {number: float(way.blocks), 2 * count + number: way.out_ms}
        taken |= dict.fromkeys(range(count + number, 2 * count), way.kept / self._unit_bytes)
        taken[3 * count] = 0.0 if cpu_bytes is None else way.cpu / max(1, cpu_bytes)
        if last:
            taken[count + number] += way.working / self._unit_bytes
            taken[3 * count + 1] = 1.0
        return taken

    def up_to(self, column: int) -> tuple[dict[int, float], float]:
        """What is held while a choice is worked on that is made, and how much may be: in parts of the unit. At the last
        of its blocks; at the first where each of them takes gradients' room off."""
        way = self.choices[column].way
        limit = self._room - (way.working + min(0, way.kept)) / self._unit_bytes
        return self._held_before(column + (way.kept >= 0)), limit

    def _held_before(self, column: int) -> dict[int, float]:
        choices = enumerate(self.choices[:column])
        return {number: choice.way.kept / self._unit_bytes for number, choice in choices if not choice.last}

    def crowded(self, values: Mapping[int, float]) -> tuple[dict[int, float], float] | None:
        """What is held and worked on at the choice where an answer has the most too much of it; None: nowhere.

        A choice and those that ``_need_as_much`` have a working set of at least its own, if a block has any of them. So
        that working set counts by the share of the blocks that have one, which is never too much.
        """
        most, found, held = _CLOSE, None, 0.0
        for column, (number, way, last) in enumerate(self.choices):
            if last:
                continue
            held += values.get(column, 0.0) * way.kept / self._unit_bytes
            share = sum(values.get(other, 0.0) * self.choices[other].way.blocks for other in self._need_as_much[column])
            excess = held + share / self.runs[number].depth * way.working / self._unit_bytes - self._room
            if excess > most:
                most, found = excess, column
        return None if found is None else self._shared(found)

    @cached_property
    def _need_as_much(self) -> Sequence[Sequence[int]]:
        """By column, the choices up to it of its run whose working set is no smaller."""
        return [
            [
                other
                for other, (number, way, last) in enumerate(self.choices[: column + 1])
                if not last and number == chosen.run and way.working >= chosen.way.working
            ]
            for column, chosen in enumerate(self.choices)
        ]

    def _shared(self, column: int) -> tuple[dict[int, float], float]:
        number, way, _ = self.choices[column]
        taken = self._held_before(column + 1)
        share = way.working / self._unit_bytes / self.runs[number].depth
        for other in self._need_as_much[column]:
            taken[other] += share * self.choices[other].way.blocks
        return taken, self._room

    def first_beyond(self, counts: Sequence[int]) -> int | None:
        """The first choice that does not fit in what those before it leave, of so many of each."""
        held = 0
        for column, (choice, count) in enumerate(zip(self.choices, counts, strict=True)):
            worst = count if choice.way.kept > 0 else 1  # the last of them, or the first
            most = held + worst * choice.way.kept
            held += count * choice.way.kept
            if count and most + choice.way.working > self.limits.room_bytes:
                return column
        return None

    def fits(self, counts: Sequence[int]) -> bool:
        """Exactly, where the program is right but for rounding."""
        waiting = sum(count * choice.way.cpu for choice, count in zip(self.choices, counts, strict=True))
        limit_bytes = self.limits.cpu_bytes
        able = limit_bytes is None or waiting <= limit_bytes
        met = all(any(counts[column] for column in demanded) for demanded in self._demands)
        return able and met and self.first_beyond(counts) is None

    def without(self, columns: Set[int]) -> "Relaxed":
        """The same without some choices."""
        runs = list(self.runs)
        for number, run in enumerate(runs):
            able = [c for column, c in enumerate(self.choices) if c.run == number and column not in columns]
            ways, last_ways = (tuple(c.way for c in able if c.last == last) for last in (False, True))
            runs[number] = run._replace(ways=ways, last_ways=last_ways)
        return Relaxed(runs, self.limits)

    def ways(self, counts: Sequence[int]) -> Iterator[Way]:
        """So many of each choice, in the order of the forward."""
        for choice, count in zip(self.choices, counts, strict=True):
            yield from [choice.way] * count
