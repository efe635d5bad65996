"""What would just fit: the largest batch, length, picture or rank whose smallest peak is within a budget."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lowtide.measure.allowed import Allowed

_TRIES = 6
_MOST_TIMES = 16
_RESOLUTION_STEP = 64
_MOST = 1024  # ranks
_RANK_STEP = 4

Name = Literal["batch", "resolution", "frames", "rank"]


@dataclass(frozen=True)
class Fit:
    """How much of one thing would just fit with the best schedule, all else unchanged. largest 0: not even the least.

    step_ms: what a step takes there; None: nothing fits. at_least: more was not looked for.
    """

    name: Name
    asked: str
    largest: str
    step_ms: float | None
    at_least: bool = False


class Peaks(Protocol):
    """What a model needs, and what it would with other sizes or another rank. sizes: all of them."""

    def smallest_peak(self, rank: int | None, sizes: Mapping[str, int]) -> int: ...

    def step_ms(self, rank: int | None, sizes: Mapping[str, int]) -> float:
        """Under the quickest schedule that fits."""
        ...

    def resident_bytes(self) -> int:
        """With the rank that was asked for, without inputs."""
        ...

    def adapter_bytes(self) -> int:
        """Of these, what the adapter needs."""
        ...


@dataclass(frozen=True)
class Asked:
    """sizes: of the inputs, all of them. rank: None: all weights are trained."""

    sizes: Mapping[str, int]
    rank: int | None
    budget_bytes: int


def what_fits(peaks: Peaks, asked: Asked, allowed: Mapping[str, Allowed]) -> Iterator[Fit]:
    sizes, rank = asked.sizes, asked.rank
    at_none = peaks.resident_bytes()

    def peak(**more: int) -> int:
        return peaks.smallest_peak(rank, {**sizes, **more})

    def takes(**more: int) -> float:
        return peaks.step_ms(rank, {**sizes, **more})

    def largest(counted: _Counted) -> int:
        return _largest(counted, asked.budget_bytes, _MOST_TIMES * counted.asked, at_none)

    if "B" in sizes:
        found = largest(_Counted(lambda number: peak(B=number), sizes["B"]))
        step_ms = takes(B=found) if found else None
        yield Fit("batch", str(sizes["B"]), str(found), step_ms, found >= _MOST_TIMES * sizes["B"])
    if sizes.get("FR", 1) > 1:
        rule = allowed.get("FR", Allowed(1))
        count = sizes["FR"] // rule.step
        found = largest(_Counted(lambda number: peak(FR=number * rule.step + rule.offset), count))
        frames = found * rule.step + rule.offset if found else 0
        step_ms = takes(FR=frames) if found else None
        yield Fit("frames", str(sizes["FR"]), str(frames), step_ms, found >= _MOST_TIMES * count)
    if {"H", "W"} <= sizes.keys():
        picture = _Picture(sizes["H"], sizes["W"], _step(allowed))
        found = largest(_Counted(lambda number: peak(**picture.sides(number)), picture.tokens))
        text, step_ms = picture.text(found), takes(**picture.sides(found)) if found else None
        yield Fit("resolution", picture.text(picture.tokens), text, step_ms, found >= _MOST_TIMES * picture.tokens)
    if rank is not None:
        counted, most = _Counted(lambda number: peaks.smallest_peak(number, sizes), rank, _RANK_STEP), max(rank, _MOST)
        found = _largest(counted, asked.budget_bytes, most, peak() - peaks.adapter_bytes())
        step_ms = peaks.step_ms(found, sizes) if found else None
        yield Fit("rank", str(rank), str(found), step_ms, found >= most)


@dataclass(frozen=True)
class _Counted:
    """peak: by number, in steps of ``step``. asked: the number that was asked for."""

    peak: Callable[[int], int]
    asked: int
    step: int = 1


@dataclass(frozen=True)
class _Picture:
    """Of one shape, as near as sides that are multiples of ``step`` allow."""

    height: int
    width: int
    step: int

    @property
    def tokens(self) -> int:
        """Squares of a step."""
        return max(1, self.height * self.width // self.step**2)

    def sides(self, tokens: int) -> dict[str, int]:
        if tokens == self.tokens:
            return {"H": self.height, "W": self.width}
        scale = (tokens * self.step**2 / (self.height * self.width)) ** 0.5
        height, width = (max(1, int(side * scale / self.step)) * self.step for side in (self.height, self.width))
        return {"H": height, "W": width}

    def text(self, tokens: int) -> str:
        sides = self.sides(tokens) if tokens else {"H": 0, "W": 0}
        return f"{sides['W']}x{sides['H']}"


def _step(allowed: Mapping[str, Allowed]) -> int:
    return math.lcm(_RESOLUTION_STEP, *(allowed[side].step for side in ("H", "W") if side in allowed))


def _largest(counted: _Counted, budget: int, most: int, at_none: int) -> int:
    """The largest number that was seen to fit, near the true one, and at most ``most``. 0: none.

    The peak rises about linearly from what is there without any, so a line through two points that were seen says where
    to look next, and when there is nothing to look for: that takes two or three looks. What the model cannot take does
    not fit.
    """
    low, high, failed = 0, most + counted.step, False
    points = [(0, float(at_none))]
    number = min(most, counted.asked)
    for _ in range(_TRIES):
        peak_bytes = _seen(counted.peak, number)
        low, high = (number, high) if peak_bytes <= budget else (low, number)
        failed = failed or math.isinf(peak_bytes)
        if math.isfinite(peak_bytes) and peak_bytes not in (known for _, known in points):  # sides are rounded
            points = sorted((*points, (number, peak_bytes)))
        number = min(_meets(points, low, budget), most)
        if number >= high:
            number = int((max(low, counted.step) * high) ** 0.5) if failed else high - counted.step
        number = number // counted.step * counted.step
        if number <= low:
            break
    return low


def _meets(points: Sequence[tuple[int, float]], low: int, budget: int) -> int:
    """Where the line from the largest that fits to the next one, else from the one before, meets the budget."""
    place = min(max(1, sum(number <= low for number, _ in points)), len(points) - 1)
    if place < 1:
        return 2 * low
    (first, at_first), (second, at_second) = points[place - 1 : place + 1]
    return int(first + (budget - at_first) * (second - first) / max(1.0, at_second - at_first))


def _seen(peak: Callable[[int], int], number: int) -> float:
    try:
        return peak(number)
    except (ValueError, RuntimeError):  # a ConfigError among them
        return math.inf
