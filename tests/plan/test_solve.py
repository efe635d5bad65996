"""The planner against every assignment of small chains, tried one by one, and by hand."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.plan import modes
from lowtide.plan.assignment import assignment_of
from lowtide.plan.costs import BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.optimum import quickest
from lowtide.plan.predict_step import StepPrediction, predict_step
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SAVED, SELECTIVE, WHOLE
from lowtide.plan.solve import smallest_peak, solve
from tests.plan.chains import LINK, every_assignment, limited_steps, most_waiting, relieved_steps, steps

MIB = 2**20


def _cost(treatment: str, *moves: str, blocks: int = 1, extra_ms: float = 0, kept=0, moved=0, working=0):
    sizes = [int(size * MIB) for size in (kept, moved, working, moved)]
    return TreatmentCost(treatment, frozenset(moves), blocks, 0.0, extra_ms, *sizes)


PLAIN = _cost(KEPT, kept=100, working=10)
FEED_FORWARD = _cost(FFN, extra_ms=1, kept=60, working=50)
RECOMPUTED = _cost(WHOLE, extra_ms=3, kept=10, working=100)
OFFLOADED = _cost(WHOLE, BOUNDARY, extra_ms=3, moved=10, working=110)


def _step(depth: int, *treatments: TreatmentCost, rate: float | None = None, **more) -> StepCosts:
    link = LinkRates(rate, rate) if rate is not None else None
    kind = BlockKind(4.0, 8.0, (PLAIN, *treatments))
    return StepCosts({"block": kind}, {"blocks": ("block",) * depth}, resident_bytes=1000 * MIB, link=link, **more)


# ---------------------------------------------------------------------- against every assignment


def _quickest_is_the_best(costs: StepCosts, every: list[StepPrediction], budget_bytes: int) -> StepPrediction:
    """every: of all assignments. Returns what was found."""
    found = quickest(costs, budget_bytes, 1e9)
    best_ms = min(made.added_ms for made in every if made.peak_bytes <= budget_bytes)
    assert found.within_ms == 0 and found.assignment is not None
    made = predict_step(costs, found.assignment)
    assert made.peak_bytes <= budget_bytes
    assert made.added_ms == pytest.approx(best_ms, rel=1e-6, abs=1e-6)
    return made


@settings(deadline=None, max_examples=300)
@given(steps(), st.floats(0, 1))
def test_the_plan_is_the_best_of_all_assignments(costs: StepCosts, share: float) -> None:
    every = [prediction for _, prediction in every_assignment(costs)]
    least, most = (pick(made.peak_bytes for made in every) for pick in (min, max))
    budget_bytes = int(least + share * (most - least))
    plan = solve(costs, budget_bytes)
    assert plan.prediction.peak_bytes <= budget_bytes
    assert plan.within_ms == 0
    best = next((a for a in plan.alternatives if a.name == modes.PLAIN and a.peak_bytes <= budget_bytes), None)
    best_ms = best.step_ms if best else min(made.step_ms for made in every if made.peak_bytes <= budget_bytes)
    assert plan.prediction.step_ms == pytest.approx(best_ms, rel=1e-6)


@settings(deadline=None, max_examples=150)
@given(limited_steps(), st.floats(0, 1))
def test_it_is_the_best_of_all_that_cpu_memory_allows(costs: StepCosts, share: float) -> None:
    every = [prediction for _, prediction in every_assignment(costs)]
    least, most = (pick(made.peak_bytes for made in every) for pick in (min, max))
    assert smallest_peak(costs).peak_bytes == least
    made = _quickest_is_the_best(costs, every, int(least + share * (most - least)))
    assert made.cpu_bytes <= (costs.host_limit_bytes or 0)


@settings(deadline=None, max_examples=200)
@given(relieved_steps(), st.floats(0, 1))
def test_it_is_the_best_where_what_runs_last_has_a_relief(costs: StepCosts, share: float) -> None:
    every = [prediction for _, prediction in every_assignment(costs)]
    least, most = smallest_peak(costs).peak_bytes, max(made.peak_bytes for made in every)
    assert least >= min(made.peak_bytes for made in every)
    _quickest_is_the_best(costs, every, int(least + share * (most - least)))


@settings(deadline=None, max_examples=150)
@given(st.one_of(steps(5), relieved_steps()), st.floats(0, 0.3), st.integers(1, 60))
def test_it_is_the_best_where_gradients_leave_their_room_until_they_come(
    costs: StepCosts, share: float, gradient_bytes: int
) -> None:
    costs = costs.with_gradients(dict.fromkeys(list(costs.kinds)[::2], gradient_bytes))
    every = [prediction for _, prediction in every_assignment(costs)]
    least, most = smallest_peak(costs).peak_bytes, max(made.peak_bytes for made in every)
    for budget_bytes in (least, int(least + share * (most - least))):
        _quickest_is_the_best(costs, every, budget_bytes)


@settings(deadline=None, max_examples=200)
@given(steps())
def test_the_smallest_peak_is_that_of_all_assignments(costs: StepCosts) -> None:
    least = min(prediction.peak_bytes for _, prediction in every_assignment(costs))
    assert smallest_peak(costs).peak_bytes == least
    with pytest.raises(ConfigError, match=rf"smallest peak that can be reached is .*\({least} bytes\)"):
        solve(costs, least - 1)


@settings(deadline=None, max_examples=100)
@given(steps(), st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_more_budget_is_never_slower(costs: StepCosts, more_bytes: list[int]) -> None:
    least = smallest_peak(costs).peak_bytes
    times = [solve(costs, least + more).prediction.step_ms for more in sorted(more_bytes)]
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(times))


@settings(deadline=None, max_examples=100)
@given(steps(), st.integers(0, 200))
def test_no_fixed_setting_that_fits_is_quicker(costs: StepCosts, more_bytes: int) -> None:
    budget_bytes = smallest_peak(costs).peak_bytes + more_bytes
    plan = solve(costs, budget_bytes)
    limit_bytes = costs.host_limit_bytes
    for other in plan.alternatives:
        fits = other.peak_bytes <= budget_bytes and (limit_bytes is None or other.cpu_bytes <= limit_bytes)
        assert not fits or plan.prediction.step_ms <= other.step_ms * (1 + 1e-6)


@settings(deadline=None, max_examples=100)
@given(steps(), st.integers(0, 200))
def test_the_schedule_is_what_was_predicted(costs: StepCosts, more_bytes: int) -> None:
    plan = solve(costs, smallest_peak(costs).peak_bytes + more_bytes)
    assert predict_step(costs, assignment_of(costs, plan.schedule)) == plan.prediction


# ---------------------------------------------------------------------- by hand


def test_it_is_the_best_where_gradients_that_are_not_there_yet_leave_all_the_room() -> None:
    def made(treatment: str, extra_ms: float = 0.0, kept: int = 0, working: int = 0, gradient: int = 30):
        return TreatmentCost(
            treatment, extra_backward_ms=extra_ms, kept_bytes=kept, working_bytes=working, gradient_bytes=gradient
        )

    large = BlockKind(0.0, 0.0, (made(KEPT, working=30), made(WHOLE, 1.0)))
    small = BlockKind(0.0, 0.0, (made(KEPT, working=1, gradient=0), made(FFN, kept=1, gradient=0)))
    costs = StepCosts({"a": large, "b": small}, {"blocks": ("a", "b", "a", "a")}, resident_bytes=90)
    for budget_bytes, added_ms in ((90, 1.0), (119, 1.0), (120, 0.0)):
        found = quickest(costs, budget_bytes, 1e9)
        assert found.assignment is not None and found.within_ms == 0
        assert predict_step(costs, found.assignment).added_ms == added_ms


def test_the_last_blocks_are_kept() -> None:
    costs = _step(6, RECOMPUTED)
    plan = solve(costs, (1000 + 10 + 5 * 100 + 10) * MIB)
    assert plan.schedule.stacks["blocks"].treatments == (WHOLE, KEPT, KEPT, KEPT, KEPT, KEPT)
    assert plan.prediction.step_ms == costs.plain_ms + 3


def test_a_small_saving_takes_the_cheap_treatment() -> None:
    plan = solve(_step(6, FEED_FORWARD, RECOMPUTED), (1000 + 6 * 100 - 2 * 40 + 10) * MIB)
    assert plan.schedule.stacks["blocks"].treatments == (FFN, FFN, KEPT, KEPT, KEPT, KEPT)


def test_it_is_left_off_where_the_plain_run_fits() -> None:
    plan = solve(_step(4, RECOMPUTED), 1410 * MIB)
    assert plan.leaves_off and plan.mode == modes.PLAIN
    assert plan.schedule.stacks["blocks"].treatments == (KEPT,) * 4 and plan.states == 0


def test_it_is_left_off_even_where_something_else_measured_as_quick() -> None:
    free = replace(RECOMPUTED, extra_backward_ms=0.0)
    assert solve(_step(4, free), 1410 * MIB).leaves_off
    assert solve(_step(4, free), 1409 * MIB).mode == "torch"


def test_a_fixed_setting_is_named_where_nothing_is_quicker() -> None:
    plan = solve(_step(4, replace(RECOMPUTED, working_bytes=90 * MIB)), (1000 + 40 + 90) * MIB)
    assert plan.mode == "torch"


def test_what_runs_last_never_moves() -> None:
    costs = _step(3, RECOMPUTED, OFFLOADED, rate=1000.0)
    plan = solve(costs, smallest_peak(costs).peak_bytes)
    assert plan.schedule.stacks["blocks"].moves == (frozenset({BOUNDARY}), frozenset({BOUNDARY}), frozenset())


def test_copies_that_do_not_hide_are_not_chosen() -> None:
    moving = _cost(KEPT, SAVED, moved=100, working=110)
    fast, slow = (_step(8, RECOMPUTED, moving, rate=rate) for rate in (100.0, 1.0))
    budget_bytes = (1000 + 500) * MIB
    assert SAVED in frozenset().union(*solve(fast, budget_bytes).schedule.stacks["blocks"].moves)
    assert not solve(slow, budget_bytes).schedule.moves_anything


def test_bytes_in_flight_are_part_of_the_peak_and_of_the_schedule() -> None:
    costs = _step(3, OFFLOADED, rate=1000.0)
    plan = solve(costs, (1000 + 100 + 10 + 110) * MIB)
    assert plan.schedule.in_flight_bytes == plan.schedule.prefetch_bytes == 10 * MIB
    assert {position.in_flight_bytes for position in plan.prediction.positions} == {10 * MIB}
    assert plan.schedule.stacks["blocks"].treatments == (WHOLE, KEPT, KEPT)
    assert [position.peak_bytes // MIB for position in plan.prediction.positions] == [1220, 1120, 1120]


def test_copies_are_spread_as_far_as_the_budget_allows() -> None:
    moving = _cost(WHOLE, BOUNDARY, extra_ms=2, kept=10, moved=30, working=100)
    recomputed = replace(RECOMPUTED, extra_backward_ms=2.5)
    costs = _step(7, recomputed, moving, rate=5.0, host_limit_bytes=90 * MIB)
    plan = solve(costs, 1300 * MIB)
    moves = [bool(moved) for moved in plan.schedule.stacks["blocks"].moves]
    assert Counter(moves) == {True: 3, False: 4}
    assert not any(before and after for before, after in itertools.pairwise(moves))


def test_cpu_memory_is_not_exceeded() -> None:
    costs = _step(6, RECOMPUTED, _cost(KEPT, SAVED, moved=100, working=110), rate=1000.0, host_limit_bytes=250 * MIB)
    plan = solve(costs, 1400 * MIB)
    assert 0 < plan.prediction.cpu_bytes <= 250 * MIB


def test_what_cannot_be_lowered_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no schedule fits in 1\.07 GiB .*1\.10 GiB.* of which 1000 MiB are there"):
        solve(_step(3, RECOMPUTED), 1100 * MIB)
    with pytest.raises(ConfigError, match="reached outside of the blocks"):
        solve(_step(3, RECOMPUTED, elsewhere_bytes=5000 * MIB), 4999 * MIB)


# ---------------------------------------------------------------------- sixty blocks


def _like_a_real_block(tensor_mib: float, forward_ms: float, uneven: float) -> BlockKind:
    """24 tensors saved; times and bytes as of a transformer block, each treatment a little off the round number."""
    u = [1 + uneven * (place % 5) / 50 for place in range(12)]

    def cost(place: int, treatment: str, *moves: str, ms=0.0, kept=0.0, moved=0.0, working=0.0, blocks=1):
        sizes = (size * tensor_mib * u[place] for size in (kept, moved, working))
        kept, moved, working = sizes
        extra_ms = ms * forward_ms * u[place] + 0.02 * len(moves)
        return _cost(treatment, *moves, blocks=blocks, extra_ms=extra_ms, kept=kept, moved=moved, working=working)

    ways = (
        cost(0, KEPT, kept=24, working=6),
        cost(1, KEPT, ATTENTION, kept=14, moved=10, working=14),
        cost(2, KEPT, SAVED, kept=1, moved=23, working=24),
        cost(3, FFN, ms=0.35, kept=13, working=15),
        cost(4, FFN, BOUNDARY, ATTENTION, ms=0.35, kept=3, moved=10, working=19),
        cost(5, WHOLE, ms=1, kept=1, working=30),
        cost(6, WHOLE, BOUNDARY, ms=1, kept=0.05, moved=1, working=31),
        cost(7, WHOLE, ms=2, kept=1, working=50, blocks=2),
        cost(8, SELECTIVE, ms=0.6, kept=2, working=29),
        cost(9, SELECTIVE, BOUNDARY, ATTENTION, ms=0.6, kept=0.05, moved=2, working=31),
    )
    return BlockKind(forward_ms, 2 * forward_ms, ways)


SIXTY = StepCosts(
    {
        "double": _like_a_real_block(27, 4.2, 1),
        "single": _like_a_real_block(24, 2.3, 2),
        "tail": _like_a_real_block(13, 1.7, 3),
    },
    {"double": ("double",) * 19, "single": ("single",) * 37, "tail": ("tail",) * 4},
    resident_bytes=23 * 2**30,
    link=LinkRates(50, 42),
)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.9])
def test_sixty_blocks_of_three_kinds_are_counted_not_enumerated(share: float) -> None:
    least = smallest_peak(SIXTY).peak_bytes
    plain = predict_step(SIXTY, dict(modes.assignments(SIXTY))[modes.PLAIN]).peak_bytes
    plan = solve(SIXTY, int(least + share * (plain - least)))
    assert plan.within_ms == 0
    assert plan.states < 4_000  # of more than 10**50
    fitting = [other.step_ms for other in plan.alternatives if other.peak_bytes <= plan.budget_bytes]
    assert plan.prediction.step_ms < min(fitting, default=float("inf"))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.9])
def test_sixty_blocks_with_little_cpu_memory(share: float) -> None:
    limit_bytes = int(0.1 * most_waiting(SIXTY))
    limited = replace(SIXTY, host_limit_bytes=limit_bytes)
    least = smallest_peak(limited).peak_bytes
    plain = predict_step(limited, dict(modes.assignments(limited))[modes.PLAIN]).peak_bytes
    plan, free = (solve(costs, int(least + share * (plain - least))) for costs in (limited, SIXTY))
    assert plan.within_ms == 0 and plan.states < 4_000
    assert plan.prediction.cpu_bytes <= limit_bytes
    assert plan.prediction.step_ms >= free.prediction.step_ms * (1 - 1e-6)


def test_a_search_that_is_stopped_says_how_far_off_it_may_be() -> None:
    budget_bytes = 32 * 2**30
    whole, stopped = quickest(SIXTY, budget_bytes, 1e9), quickest(SIXTY, budget_bytes, 1e9, most_work=0)
    assert whole.within_ms == 0 and whole.assignment is not None
    best_ms = predict_step(SIXTY, whole.assignment).added_ms
    assert stopped.within_ms > 0 and stopped.assignment is None
    assert 1e9 - stopped.within_ms <= best_ms


def test_the_link_of_the_small_chains_is_what_it_says() -> None:
    assert LINK.out_ms(8) == pytest.approx(2) and LINK.back_ms(8) == pytest.approx(4)


def test_a_time_that_only_more_bytes_in_flight_would_allow_is_not_claimed() -> None:
    """Copies that are left from run to run are bounded by what a schedule has in flight, not by what others may."""
    attention, saved = frozenset({ATTENTION}), frozenset({SAVED})
    link = LinkRates(1e3 / 2**30 / 0.25, 1e3 / 2**30 / 0.125)
    small = BlockKind(
        0.0,
        10.0,
        (
            TreatmentCost(KEPT, kept_bytes=40),
            TreatmentCost(KEPT, attention, cpu_bytes=16, copied_bytes=16),
            TreatmentCost(WHOLE, extra_backward_ms=3.5),
        ),
    )
    large = BlockKind(
        8.0,
        10.0,
        (
            TreatmentCost(KEPT, kept_bytes=40),
            TreatmentCost(KEPT, saved, extra_backward_ms=0.5, kept_bytes=10, cpu_bytes=32, copied_bytes=32),
        ),
    )
    costs = StepCosts({"a": small, "b": large}, {"x": ("a",) * 3, "y": ("b",) * 3}, 0, link=link)
    every = [prediction for _, prediction in every_assignment(costs)]
    for budget_bytes in range(124, 260, 8):
        best_ms = min(made.added_ms for made in every if made.peak_bytes <= budget_bytes)
        assert solve(costs, budget_bytes).prediction.added_ms == pytest.approx(best_ms, abs=1e-6)
