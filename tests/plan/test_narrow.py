"""Plans by which less than usual is brought back ahead."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.plan.costs import BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.narrow import narrow_plan
from lowtide.plan.predict_step import predict_schedule
from lowtide.plan.schedule import ATTENTION, BOUNDARY, KEPT, SELECTIVE, WHOLE
from lowtide.plan.solve import smallest_peak, solve

ARGUMENTS, BOTH = frozenset({BOUNDARY}), frozenset({BOUNDARY, ATTENTION})


def _costs(rest_bytes: int, **more: LinkRates | None) -> StepCosts:
    """Blocks of 40 bytes of arguments, and so much more that the selective treatment holds or moves: it is quicker."""

    def moved(treatment: str, moves: frozenset[str], size_bytes: int, extra_ms: float, kept: int = 0) -> TreatmentCost:
        return TreatmentCost(treatment, moves, 1, 0.0, extra_ms, kept, size_bytes, 300, size_bytes)

    ways = (
        TreatmentCost(KEPT, kept_bytes=1000, working_bytes=50),
        TreatmentCost(WHOLE, extra_backward_ms=6.0, kept_bytes=40, working_bytes=300),
        TreatmentCost(SELECTIVE, extra_backward_ms=3.0, kept_bytes=40 + rest_bytes, working_bytes=300),
        moved(WHOLE, ARGUMENTS, 40, 6.0),
        moved(SELECTIVE, ARGUMENTS, 40, 3.0, rest_bytes),
        moved(SELECTIVE, BOTH, 40 + rest_bytes, 3.0),
    )
    link = LinkRates(1e3, 1e3)
    kinds = {"b": BlockKind(6.0, 12.0, ways)}
    return replace(StepCosts(kinds, {"s": ("b",) * 8}, resident_bytes=500, link=link), **more)


def _tight(costs: StepCosts) -> int:
    """A byte less than the selective treatment of all blocks but the last needs."""
    whole = next(bytes_ for bytes_ in range(500, 5000) if _selective(costs, bytes_))
    return whole - 1


def _selective(costs: StepCosts, budget_bytes: int) -> bool:
    if smallest_peak(costs).peak_bytes > budget_bytes:
        return False
    return solve(costs, budget_bytes).schedule.stacks["s"].words.count("selective+attention+boundary") == 7


def test_less_ahead_makes_room_for_a_quicker_plan() -> None:
    costs = _costs(80)
    budget_bytes = _tight(costs)
    plan, usual = narrow_plan(costs, budget_bytes), solve(costs, budget_bytes)
    assert plan is not None
    assert plan.schedule.stacks["s"].words.count("selective+attention+boundary") == 7
    assert (plan.schedule.in_flight_bytes, plan.schedule.prefetch_bytes) == (120, 120 * 2 // 3)
    assert plan.budget_bytes == budget_bytes >= plan.prediction.peak_bytes
    assert plan.prediction == predict_schedule(costs, plan.schedule)
    assert plan.prediction.step_ms < usual.prediction.step_ms
    assert plan.mode is None


@pytest.mark.parametrize("rest_bytes", [200, 5])
def test_what_may_be_one_piece_comes_back_whole(rest_bytes: int) -> None:
    """Of 240 bytes 200 may be one tensor, of 45 the 40 are: a bound below that would bound nothing."""
    costs = _costs(rest_bytes)
    plan = narrow_plan(costs, smallest_peak(costs).peak_bytes)
    assert plan is None or (plan.schedule.prefetch_bytes or 0) >= max(rest_bytes, 40)


def test_without_a_link_or_room_there_is_none() -> None:
    costs = _costs(80)
    assert narrow_plan(replace(costs, link=None), _tight(costs)) is None
    assert narrow_plan(costs, smallest_peak(costs).peak_bytes - 60) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(0, 3000))
def test_it_fits_whatever_the_room(rest_bytes: int, more_bytes: int) -> None:
    costs = _costs(rest_bytes)
    budget_bytes = smallest_peak(costs).peak_bytes + more_bytes
    plan = narrow_plan(costs, budget_bytes)
    assert plan is None or predict_schedule(costs, plan.schedule).peak_bytes <= budget_bytes
