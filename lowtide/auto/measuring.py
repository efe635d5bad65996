"""The first steps under ``auto``: what runs in each, and what is learnt from it.

Every step is a training step with the gradients of a plain run. They run under

1. a forecast's plan that leaves room for its errors; afterwards the peak is known (and optimizer states exist);
2. a schedule that has each treatment on some blocks, four times, of which the last three are timed;
3. the plan from measured times, the plan from what that one then took, and the same two of plans that move nothing, a
   few steps each. The first plan once more, and the two best of the fixed settings, if they are not far behind by those
   times; the plan that would win most if one treatment were quicker than it seems, one with less
   brought back ahead, where that makes room for a quicker one; and the plan from what all of these took;
4. the quickest of those again in turns, and of these those that are still close, where any are or little room is left:
   a busy host makes all steps of some seconds late. What is quickest stays.

Where the plain run fits, it stays with that, and measures nothing but its peak.
"""

import itertools
import logging
import math
import statistics
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Protocol

from lowtide.auto.budget import runs_out_early
from lowtide.auto.planner import Planner, in_short
from lowtide.errors import ConfigError
from lowtide.measure.probe import Probed
from lowtide.plan.answer import Plan
from lowtide.plan.schedule import Schedule
from lowtide.units import format_bytes

_log = logging.getLogger("lowtide")

Steps = Generator[bool, Probed | None]
"""What is left of measuring: at each ``yield`` a step runs, and what it showed comes back. What is yielded says whether
the memory of each block is to be seen."""

_TRIED = {True: "tried for some steps, from measured times", False: "tried for some steps, with nothing moving"}
_ONCE_MORE, _FIXED = "tried for some steps, once more", "tried for some steps, as one setting for all blocks"
_HOPED = "tried for some steps, since a treatment in it may be quicker than it seems"
_NARROW = "tried for some steps, with less brought back ahead"
_LAST, _AGAIN = "tried for some steps, from what all of these took", "run once more before one stays"
_MOST_FIXED = 2
_TIMED = 3
"""Steps under one schedule that count, by their median: on a busy host single ones are late by a tenth. The first under
any schedule counts bytes, which takes time of its own."""
_NOT_FAR = 0.15
"""Of the quickest step's time, by which a plan may be slower by prediction and still be tried: treatments seemed slower
by as much when they were measured on single blocks."""
_ROUNDS = ((6, 0.15), (3, 0.05), (2, 0.03))
"""How many plans run once more beside each other, and by how much of the quickest step's time these may seem slower. On
a busy host the median of three steps of one plan and the next three of the same lay 4 % apart, and 15 % once."""
_CROWDED = 2
"""Of the steps that are timed at a time, so many in which the allocator gave back what it had cached: those to come
would, too, and each waits for the device then."""
_CROWDED_MORE, _ONLY_IF_NOTHING_ELSE = 0.05, 1e3
"""Of the time of such a step, that later ones may well take longer: what lies where changes from one to the next. Where
they may run out of memory instead, such a plan stays only if nothing else does."""
MOST_STEPS = 2 + (1 + 4 + 1 + _MOST_FIXED + 1 + 1 + 1 + sum(most for most, _ in _ROUNDS)) * (1 + _TIMED)
"""Until it settles, the first under what stays among them: where all steps are of one size and none fails."""
_WORTH = 0.01
"""Of the time of a step, that copies have to save to be worth it: what else uses the link or the host may change."""

_NARROW_WORTH = 0.03
"""Of it, that less brought back ahead has to save by prediction."""


@dataclass(frozen=True)
class _Tried:
    """A plan as it ran. runs_ms: each time, those of its steps that were complete. reserved_bytes: the most; 0: not
    known. risk: of its time, by which it counts as slower, as the allocator had to make room for it."""

    plan: Plan
    runs_ms: tuple[tuple[float, ...], ...] = ()
    reserved_bytes: int = 0
    risk: float = 0.0

    @property
    def again(self) -> int:
        """How often it has run once more."""
        return max(0, len(self.runs_ms) - 1)

    @property
    def step_ms(self) -> float:
        """By the quickest run, as a busy host makes some late and none early; of its steps the quickest would favour
        what was lucky once."""
        return min((statistics.median(times_ms) for times_ms in self.runs_ms if times_ms), default=math.inf)

    @property
    def counted_ms(self) -> float:
        """To be compared."""
        return self.counted(self.step_ms)

    @property
    def surely_ms(self) -> float:
        """To be compared with plans that have run once more."""
        return self.counted_ms if self.again else self.counted(max(itertools.chain(*self.runs_ms), default=math.inf))

    def counted(self, step_ms: float) -> float:
        return step_ms * (1 + _WORTH * self.plan.schedule.moves_anything) * (1 + self.risk)


class Attached(Protocol):
    """The model, under one schedule after another."""

    def run_under(self, schedule: Schedule) -> None: ...

    def take(self, plan: Plan, settled: bool) -> None:
        """Run under it, and say so to whoever asks. settled: it stays."""


def measuring(planner: Planner, attached: Attached) -> Steps:
    """Ends when the plan that stays has been taken. Raises ConfigError where nothing fits, before the first step."""
    plan = _take(planner, attached, planner.plan(careful=True), "to begin with, from shapes")
    planner.learn_peak(plan.schedule, (yield False))
    sample = planner.sampling()
    if sample is None or plan.leaves_off:
        made = _candidate(planner)
        stays = planner.as_it_ran(plan) if made is None or made.schedule == plan.schedule else made
        _take(planner, attached, stays, "from now on", settled=True)
        return
    attached.run_under(sample)
    _log.info("auto: some steps measure each treatment on some blocks")
    seen = yield True
    planner.learn_bytes(sample, seen)
    planner.learn_peak(sample, seen)
    timed = []
    for _ in range(_TIMED):
        timed.append((yield False))
    planner.learn_times(sample, [probed for probed in timed if probed is not None])
    tried: list[_Tried] = []
    for moving, like in itertools.product((True, False), (False, True)):
        yield from _try_new(planner, attached, _candidate(planner, moving, like), _TRIED[moving], tried)
    if _may_be_quicker(planner, plan, tried):
        again = replace(planner.as_it_ran(plan), foreseen=None)
        yield from _try_new(planner, attached, again, _ONCE_MORE, tried)
    for _ in range(_MOST_FIXED):
        fixed = next((made for made in planner.fixed_plans() if _may_be_quicker(planner, made, tried)), None)
        yield from _try_new(planner, attached, fixed, _FIXED, tried)
    yield from _try_new(planner, attached, _hoped(planner, tried), _HOPED, tried)
    yield from _try_new(planner, attached, _narrow(planner, tried), _NARROW, tried)
    yield from _try_new(planner, attached, _candidate(planner, like=True), _LAST, tried)
    for number, (most, close) in enumerate(_ROUNDS, start=1):
        for _ in range(most):
            if (worth := _worth_another_run(planner, tried, number, close)) is not None:
                yield from _run_again(planner, attached, worth, tried)
    _take(planner, attached, _stays(planner, tried, plan), "from now on", settled=True)


def _try_new(
    planner: Planner, attached: Attached, plan: Plan | None, why: str, tried: list[_Tried]
) -> Generator[bool, Probed | None]:
    """Unless its schedule has been tried."""
    if plan is not None and all(plan.schedule != other.plan.schedule for other in tried):
        tried.append((yield from _try(planner, _take(planner, attached, plan, why))))


def _worth_another_run(planner: Planner, tried: list[_Tried], times: int, close: float) -> _Tried | None:
    """The quickest that has not run again so many times, among those that are close: by half of what its own steps
    took, and half of what all steps say of it, which are more and tell less of it alone. The very quickest does not
    need it where it is the only one and was nowhere near the limit: pieces that fit nothing differ little from one time
    to the next."""

    def expected_ms(one: _Tried) -> float:
        return (one.counted_ms + one.counted(planner.as_it_ran(one.plan).prediction.step_ms)) / 2

    fit = [one for one in tried if planner.fits(one.plan)]
    expected = sorted(((expected_ms(one), one) for one in fit), key=lambda each: each[0])
    near = [one for ms, one in expected if ms <= (1 + close) * expected[0][0]]
    if not near or (len(near) == 1 and not planner.near_the_limit(near[0].reserved_bytes)):
        return None
    return next((one for one in near if one.again < times), None)


def _stays(planner: Planner, tried: list[_Tried], first: Plan) -> Plan:
    """The quickest that still fits; another one where none does, as more lies there than when they were made."""
    able = [one for one in tried if planner.fits(one.plan)]
    if able:
        ran_again = any(one.again for one in able)
        return min(able, key=lambda one: one.surely_ms if ran_again else one.counted_ms).plan
    return _candidate(planner) or first


def _run_again(
    planner: Planner, attached: Attached, before: _Tried, tried: list[_Tried]
) -> Generator[bool, Probed | None]:
    again = yield from _try(planner, _take(planner, attached, before.plan, _AGAIN))
    runs_ms, most_bytes = before.runs_ms + again.runs_ms, max(before.reserved_bytes, again.reserved_bytes)
    tried[tried.index(before)] = _Tried(again.plan, runs_ms, most_bytes, again.risk)


def _candidate(planner: Planner, moving: bool = True, like: bool = False) -> Plan | None:
    """None where nothing seems to fit: without offload, or because the last step took more than was expected."""
    try:
        return planner.plan(moving=moving, like=like)
    except ConfigError:
        return None


def _hoped(planner: Planner, tried: list[_Tried]) -> Plan | None:
    """The plan with the most to win, where a treatment that few blocks have had may be quicker than it seems."""
    if not tried:
        return None
    made = list(planner.hoped_plans(min(tried, key=lambda one: one.counted_ms).plan.schedule))
    gain, plan = max(made, key=lambda one: one[0], default=(0.0, None))
    return None if plan is None or gain < _WORTH else replace(planner.as_it_ran(plan), foreseen=None)


def _narrow(planner: Planner, tried: list[_Tried]) -> Plan | None:
    """None where it would win little, as waits for copies may take longer than predicted."""
    plan = planner.narrow_plan()
    quickest_ms = min((one.counted_ms for one in tried), default=0.0)
    if plan is None or (1 + _NARROW_WORTH) * plan.prediction.step_ms > quickest_ms:
        return None
    return replace(planner.as_it_ran(plan), foreseen=None)


def _may_be_quicker(planner: Planner, plan: Plan, tried: list[_Tried]) -> bool:
    """Whether a plan is another one than those, and by what is known now fits and is not far behind."""
    if any(plan.schedule == other.plan.schedule for other in tried) or not planner.fits(plan):
        return False
    quickest_ms = min((other.step_ms for other in tried), default=math.inf)
    return planner.as_it_ran(plan).prediction.step_ms <= (1 + _NOT_FAR) * quickest_ms


def _try(planner: Planner, plan: Plan) -> Generator[bool, Probed | None, _Tried]:
    """Some steps under a plan that is attached. What they take is the median."""
    planner.learn_peak(plan.schedule, (yield False))
    seen = []
    for _ in range(_TIMED):
        probed = yield False
        planner.learn_peak(plan.schedule, probed)
        if probed is not None:
            seen.append(probed)
    if not seen:
        return _Tried(planner.as_it_ran(plan), ((),))
    times_ms = tuple(probed.step_ms for probed in seen)
    step_ms = statistics.median(times_ms)
    most_bytes = max(probed.peak_bytes or 0 for probed in seen)
    peak = f" and {format_bytes(most_bytes)}" if most_bytes else ""
    _log.info("auto: a step takes %.0f ms%s (predicted: %.0f ms)", step_ms, peak, plan.prediction.step_ms)
    noise_ms = statistics.stdev(times_ms) / math.sqrt(len(times_ms)) if len(times_ms) > 1 else 0.0
    planner.learn_step(plan, step_ms, noise_ms)
    reserved_bytes = max(probed.reserved_bytes or 0 for probed in seen)
    return _Tried(planner.as_it_ran(plan), (times_ms,), reserved_bytes, _risk(seen))


def _risk(seen: list[Probed]) -> float:
    if sum(probed.retries > 0 for probed in seen) < _CROWDED:
        return 0.0
    risk = _ONLY_IF_NOTHING_ELSE if runs_out_early() else _CROWDED_MORE
    stays = "nothing else does" if runs_out_early() else f"all others are {risk:.0%} slower"
    _log.info("auto: PyTorch gave cached memory back in most of these steps: it stays only if %s", stays)
    return risk


def _take(planner: Planner, attached: Attached, plan: Plan, why: str, settled: bool = False) -> Plan:
    """why: it is taken, for people."""
    attached.take(plan, settled)
    _log.info("auto: %s: %s", why, in_short(plan, planner.budget_bytes))
    return plan
