"""The first steps under ``auto``: what runs in each, and what is learnt from it.

Every step is a training step with the gradients of a plain run. They run under

1. a forecast's plan that leaves room for its errors; afterwards the peak is known (and optimizer states exist);
2. a schedule that has each treatment on some blocks, four times, of which the last three are timed;
3. the plan from measured times, the plan from what that one then took, and the same two of plans that move nothing, a
   few steps each. The first plan once more, and the two best of the fixed settings, if they are not far behind by those
   times; and the plan from what all of these took. What was quickest stays.

Where the plain run fits, it stays with that, and measures nothing but its peak.
"""

import itertools
import logging
import math
import statistics
from collections.abc import Generator
from dataclasses import replace
from typing import Protocol

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
_LAST = "tried for some steps, from what all of these took"
_MOST_FIXED = 2
_TIMED = 3
"""Steps under one schedule that count, by their median: on a busy host single ones are late by a tenth. The first under
any schedule counts bytes, which takes time of its own."""
_NOT_FAR = 0.15
"""Of the quickest step's time, by which a plan may be slower by prediction and still be tried: treatments seemed slower
by as much when they were measured on single blocks."""
_WORTH = 0.01
"""Of the time of a step, that copies have to save to be worth it: what else uses the link or the host may change."""


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
    tried: list[tuple[float, Plan]] = []
    for moving, like in itertools.product((True, False), (False, True)):
        yield from _try_new(planner, attached, _candidate(planner, moving, like), _TRIED[moving], tried)
    if _may_be_quicker(planner, plan, tried):
        again = replace(planner.as_it_ran(plan), foreseen=None)
        yield from _try_new(planner, attached, again, _ONCE_MORE, tried)
    for _ in range(_MOST_FIXED):
        fixed = next((made for made in planner.fixed_plans() if _may_be_quicker(planner, made, tried)), None)
        yield from _try_new(planner, attached, fixed, _FIXED, tried)
    yield from _try_new(planner, attached, _candidate(planner, like=True), _LAST, tried)
    _take(planner, attached, min(tried, key=_quickest, default=(math.inf, plan))[1], "from now on", settled=True)


def _try_new(
    planner: Planner, attached: Attached, plan: Plan | None, why: str, tried: list[tuple[float, Plan]]
) -> Generator[bool, Probed | None]:
    """Unless its schedule has been tried."""
    if plan is not None and all(plan.schedule != other.schedule for _, other in tried):
        step_ms = yield from _try(planner, _take(planner, attached, plan, why))
        tried.append((step_ms, planner.as_it_ran(plan)))


def _candidate(planner: Planner, moving: bool = True, like: bool = False) -> Plan | None:
    """None where nothing seems to fit: without offload, or because the last step took more than was expected."""
    try:
        return planner.plan(moving=moving, like=like)
    except ConfigError:
        return None


def _may_be_quicker(planner: Planner, plan: Plan, tried: list[tuple[float, Plan]]) -> bool:
    """Whether a plan is another one than those, and by what is known now not far behind."""
    if any(plan.schedule == other.schedule for _, other in tried):
        return False
    quickest_ms = min((step_ms for step_ms, _ in tried), default=math.inf)
    return planner.as_it_ran(plan).prediction.step_ms <= (1 + _NOT_FAR) * quickest_ms


def _try(planner: Planner, plan: Plan) -> Generator[bool, Probed | None, float]:
    """Milliseconds of a step under a plan that is attached, the median of a few; infinite if none was complete."""
    planner.learn_peak(plan.schedule, (yield False))
    times_ms, most_bytes = [], 0
    for _ in range(_TIMED):
        seen = yield False
        planner.learn_peak(plan.schedule, seen)
        if seen is not None:
            times_ms.append(seen.step_ms)
            most_bytes = max(most_bytes, seen.peak_bytes or 0)
    if not times_ms:
        return math.inf
    step_ms = statistics.median(times_ms)  # the quickest would favour whatever was lucky once
    peak = f" and {format_bytes(most_bytes)}" if most_bytes else ""
    _log.info("auto: a step takes %.0f ms%s (predicted: %.0f ms)", step_ms, peak, plan.prediction.step_ms)
    planner.learn_step(plan, step_ms)
    return step_ms


def _quickest(tried: tuple[float, Plan]) -> float:
    step_ms, plan = tried
    return step_ms * (1 + _WORTH * plan.schedule.moves_anything)


def _take(planner: Planner, attached: Attached, plan: Plan, why: str, settled: bool = False) -> Plan:
    """why: it is taken, for people."""
    attached.take(plan, settled)
    _log.info("auto: %s: %s", why, in_short(plan, planner.budget_bytes))
    return plan
