"""Less brought back ahead than usual, where room is scarce: backward may wait for copies, but its peak is lower. Pure
functions."""

from dataclasses import replace

from lowtide.errors import ConfigError
from lowtide.plan.answer import Plan
from lowtide.plan.assignment import assignment_of, in_flight_bytes_for
from lowtide.plan.costs import StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_schedule
from lowtide.plan.schedule import ATTENTION, BOUNDARY
from lowtide.plan.solve import solve

_NARROW = 2 / 3
"""Of the bytes that are brought back ahead usually. The way out stays as it is: memory is scarcest in backward, and
held to that both ways, Wan 2.1 1.3B took 2.6 % longer on an H200 (`benchmarks/LOG.md`, 2026-12-01)."""
_WORTH = 0.9
"""Of them, that more would not be worth a plan of its own."""


def narrow_plan(costs: StepCosts, budget_bytes: int) -> Plan | None:
    """The quickest of the plans that would be the best if there were a little more room, and fit with so much less
    ahead. None where none does, or where what they copy of a block may be one piece, which comes back whole."""
    if costs.link is None:
        return None
    sizes = {cost.copied_bytes for kind in costs.kinds.values() for cost in kind.treatments if _in_pieces(cost)}
    made = [_narrowed(costs, budget_bytes, size_bytes) for size_bytes in sorted(sizes)]
    return min((plan for plan in made if plan is not None), key=lambda plan: plan.prediction.step_ms, default=None)


def _narrowed(costs: StepCosts, budget_bytes: int, copied_bytes: int) -> Plan | None:
    """copied_bytes: of the treatment that is to copy the most; so much less of it ahead is the room that is won."""
    try:
        wide = solve(costs, budget_bytes + int((1 - _NARROW) * copied_bytes))
    except ConfigError:
        return None
    chosen = assignment_of(costs, wide.schedule)
    largest = max((cost for name in chosen for cost in chosen[name]), key=lambda cost: cost.copied_bytes)
    ahead_bytes = _narrow_bytes(costs, largest)
    if ahead_bytes is None:
        return None
    schedule = replace(wide.schedule, prefetch_bytes=ahead_bytes)
    made = predict_schedule(costs, schedule)
    if not made.fits(budget_bytes, costs.host_limit_bytes):
        return None
    return replace(wide, budget_bytes=budget_bytes, schedule=schedule, prediction=made, mode=None)


def _in_pieces(cost: TreatmentCost) -> bool:
    """Whether what it copies is its arguments, and something else."""
    return {BOUNDARY, ATTENTION} <= cost.moves


def _narrow_bytes(costs: StepCosts, largest: TreatmentCost) -> int | None:
    """How much may come back ahead: no less than its arguments, nor than the rest."""
    if not _in_pieces(largest):
        return None
    alike = (kind.by_way.get((largest.treatment, frozenset({BOUNDARY}), 1)) for kind in costs.kinds.values())
    arguments_bytes = max((cost.copied_bytes for cost in alike if cost is not None), default=0)
    pieces = arguments_bytes, largest.copied_bytes - arguments_bytes
    ahead_bytes = max(*pieces, int(_NARROW * in_flight_bytes_for(largest.copied_bytes)))
    return ahead_bytes if ahead_bytes <= _WORTH * in_flight_bytes_for(largest.copied_bytes) else None
