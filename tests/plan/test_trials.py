"""What is learnt of whole steps: which treatment was timed wrongly, and never that copies save time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.plan.assignment import Assignment
from lowtide.plan.costs import COPYING, BlockKind, LinkRates, StepCosts
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import BOUNDARY, FFN, KEPT, SELECTIVE, WHOLE
from lowtide.plan.solve import solve
from lowtide.plan.trials import Trials
from tests.plan.chains import LINK, steps
from tests.plan.test_sampling import kind

MOVED = frozenset({BOUNDARY})
TIMED = StepCosts({"a": kind(10.0)}, {"blocks": ("a",) * 12}, resident_bytes=20, other_ms=15.0, link=LINK)
WAYS = [(KEPT, frozenset(), 1), (FFN, frozenset(), 1), (SELECTIVE, frozenset(), 1), (WHOLE, MOVED, 1)]


def of(costs: StepCosts, *counts: int) -> Assignment:
    """So many blocks of each of ``WAYS``."""
    by_way = costs.kinds["a"].by_way
    return {"blocks": tuple(by_way[way] for way, count in zip(WAYS, counts, strict=True) for _ in range(count))}


def taking(costs: StepCosts, **times: float) -> StepCosts:
    """times: what treatments add, as a multiple."""

    def changed(kind: BlockKind) -> BlockKind:
        treatments = (
            replace(
                cost,
                extra_forward_ms=cost.extra_forward_ms * times.get(cost.treatment, 1.0),
                extra_backward_ms=cost.extra_backward_ms * times.get(cost.treatment, 1.0),
            )
            for cost in kind.treatments
        )
        return replace(kind, treatments=tuple(treatments))

    return replace(costs, kinds={name: changed(kind) for name, kind in costs.kinds.items()})


def step_ms(costs: StepCosts, *counts: int) -> float:
    return predict_step(costs, of(costs, *counts)).step_ms


def test_without_a_step_all_is_as_it_was_timed() -> None:
    assert Trials(TIMED).applied(TIMED) == TIMED


def test_bytes_are_those_of_now() -> None:
    trials = Trials(TIMED)
    trials.add(of(TIMED, 0, 0, 12, 0), 2 * step_ms(TIMED, 0, 0, 12, 0))
    now = replace(TIMED, resident_bytes=99, kinds={"a": TIMED.kinds["a"].with_gradients(7)}, in_flight_share=0.5)
    after = trials.applied(now)
    assert (after.resident_bytes, after.in_flight_share) == (99, 0.5)
    for way, cost in after.kinds["a"].by_way.items():
        assert cost.extra_ms >= now.kinds["a"].by_way[way].extra_ms
        assert replace(cost, extra_forward_ms=0.0, extra_backward_ms=0.0) == replace(
            now.kinds["a"].by_way[way], extra_forward_ms=0.0, extra_backward_ms=0.0
        )


def test_a_step_that_took_another_time_each_time_says_less() -> None:
    def learnt_ms(noise_ms: float) -> float:
        trials = Trials(TIMED)
        trials.add(of(TIMED, 0, 0, 12, 0), 1.2 * step_ms(TIMED, 0, 0, 12, 0), noise_ms)
        return step_ms(trials.applied(TIMED), 0, 0, 12, 0) - step_ms(TIMED, 0, 0, 12, 0)

    assert learnt_ms(0.0) == learnt_ms(0.001) > learnt_ms(10.0) > learnt_ms(100.0) > 0


def test_steps_of_several_plans_tell_which_treatment_was_timed_wrongly() -> None:
    true = taking(TIMED, selective=0.6)
    trials = Trials(TIMED)
    for counts in ((6, 0, 6, 0), (2, 4, 6, 0), (0, 0, 12, 0), (4, 8, 0, 0)):
        trials.add(of(TIMED, *counts), step_ms(true, *counts))
    after = trials.applied(TIMED)
    before = TIMED.kinds["a"].by_way
    times = {cost.way: cost.extra_ms / before[cost.way].extra_ms for cost in after.kinds["a"].treatments[1:]}
    assert times[SELECTIVE, frozenset(), 1] == pytest.approx(0.6, abs=0.06)
    assert times[FFN, frozenset(), 1] == pytest.approx(1.0, abs=0.06)
    for counts in ((8, 0, 4, 0), (0, 6, 6, 0)):  # none of those that ran
        assert step_ms(after, *counts) == pytest.approx(step_ms(true, *counts), rel=0.01)


def test_a_treatment_that_seemed_slow_is_taken_up_once_a_plan_with_it_was_not() -> None:
    """Timed on single blocks it seems slower than whole blocks, which keep little less."""
    true = replace(TIMED, link=None)
    timed = taking(true, selective=2.0)
    room = 20 + 12 * 3 + 14
    before = solve(timed, room)
    assert SELECTIVE not in before.schedule.stacks["blocks"].treatments
    trials = Trials(timed)
    for counts in ((0, 0, 12, 0), (4, 0, 8, 0)):
        trials.add(of(timed, *counts), step_ms(true, *counts))
    after = solve(trials.applied(timed), room)
    assert SELECTIVE in after.schedule.stacks["blocks"].treatments


def ratios(costs: StepCosts) -> dict[str, float]:
    """Of what each treatment adds, over what it was timed with."""
    before = TIMED.kinds["a"].by_way
    return {
        treatment: costs.kinds["a"].by_way[treatment, frozenset(), 1].extra_ms
        / before[treatment, frozenset(), 1].extra_ms
        for treatment in (FFN, SELECTIVE, WHOLE)
    }


def test_without_a_step_each_treatment_may_be_quicker_by_what_probes_err() -> None:
    hoped = [ratios(costs) for costs in Trials(TIMED).hoped(TIMED)]
    assert hoped == [
        pytest.approx({FFN: 0.7, SELECTIVE: 1.0, WHOLE: 1.0}),
        pytest.approx({FFN: 1.0, SELECTIVE: 0.7, WHOLE: 1.0}),
        pytest.approx({FFN: 1.0, SELECTIVE: 1.0, WHOLE: 0.8}),
    ]


def test_what_steps_have_told_of_is_hardly_hoped_for_any_more() -> None:
    trials = Trials(TIMED)
    for counts in ((0, 0, 0, 12), (6, 0, 0, 6), (12, 0, 0, 0), (3, 0, 0, 9)):
        trials.add(of(TIMED, *counts), step_ms(TIMED, *counts))
    ffn, selective, whole = (ratios(costs) for costs in trials.hoped(TIMED))
    assert (ffn[FFN], selective[SELECTIVE]) == pytest.approx((0.7, 0.7))
    assert 0.9 < whole[WHOLE] < 1.0


def test_where_one_treatment_is_quicker_what_ran_beside_it_was_slower() -> None:
    """All that ran is one mixture: what it took is known, and not of which."""
    trials, counts = Trials(TIMED), (0, 6, 6, 0)
    for _ in range(20):
        trials.add(of(TIMED, *counts), step_ms(TIMED, *counts))
    for costs, treatment, other in zip(trials.hoped(TIMED), (FFN, SELECTIVE), (SELECTIVE, FFN), strict=False):
        found = ratios(costs)
        assert found[treatment] < 0.9 and found[other] > 1.0
        assert step_ms(costs, *counts) == pytest.approx(step_ms(TIMED, *counts), rel=0.005)


def test_copies_never_save_time() -> None:
    trials = Trials(TIMED)
    counts = 0, 0, 0, 12
    trials.add(of(TIMED, *counts), 0.5 * step_ms(TIMED, *counts))
    moved = trials.applied(TIMED).kinds["a"].by_way[WHOLE, MOVED, 1]
    kept = trials.applied(TIMED).kinds["a"].by_way[WHOLE, frozenset(), 1]
    assert moved.extra_ms >= kept.extra_ms


def test_copies_may_turn_out_to_take_less_than_they_were_thought_to() -> None:
    """Eight milliseconds of the link a block, and so a tenth of it of the step's."""
    link = LinkRates(2 / 2**30 / 8e-3, 2 / 2**30 / 8e-3)
    slower_ms = COPYING * 8.0
    costs = tuple(
        replace(cost, extra_backward_ms=cost.extra_backward_ms + slower_ms) if cost.moves else cost
        for cost in TIMED.kinds["a"].treatments
    )
    timed = replace(TIMED, kinds={"a": replace(TIMED.kinds["a"], treatments=costs)}, link=link)
    kind = timed.kinds["a"]
    moved, stays = kind.by_way[WHOLE, MOVED, 1], kind.by_way[WHOLE, frozenset(), 1]
    assert kind.copying_ms(moved) == pytest.approx(slower_ms) and kind.copying_ms(stays) == 0.0
    trials = Trials(timed)
    for cost, less_ms in ((moved, 12 * slower_ms), (stays, 0.0)):
        chosen = {"blocks": (cost,) * 12}
        trials.add(chosen, predict_step(timed, chosen).step_ms - less_ms)
    after = trials.applied(timed).kinds["a"]
    assert 0 <= after.copying_ms(after.by_way[WHOLE, MOVED, 1]) < 0.5 * slower_ms
    assert after.by_way[WHOLE, frozenset(), 1].extra_ms == pytest.approx(stays.extra_ms, rel=0.05)


def test_copies_that_take_time_though_they_hide() -> None:
    trials = Trials(TIMED)
    for counts, more_ms in (((0, 0, 0, 12), 9.0), ((6, 0, 0, 6), 4.5), ((0, 12, 0, 0), 0.0), ((0, 0, 12, 0), 0.0)):
        trials.add(of(TIMED, *counts), step_ms(TIMED, *counts) + more_ms)
    after = trials.applied(TIMED).kinds["a"].by_way
    assert after[WHOLE, MOVED, 1].extra_ms > after[WHOLE, frozenset(), 1].extra_ms


@given(steps(), st.lists(st.tuples(st.randoms(use_true_random=False), st.floats(0.5, 2.0)), min_size=1, max_size=5))
def test_no_time_is_negative_whatever_steps_took(costs: StepCosts, ran: list[tuple[object, float]]) -> None:
    trials = Trials(costs)
    for random, factor in ran:
        chosen = {
            name: tuple(random.choice([c for c in costs.kinds[k].treatments if c.blocks == 1]) for k in kinds)  # type: ignore[attr-defined]
            for name, kinds in costs.stacks.items()
        }
        trials.add(chosen, factor * predict_step(costs, chosen).step_ms + 0.1)
    for after in (trials.applied(costs), *trials.hoped(costs)):
        assert after.other_ms >= 0
        for found in after.kinds.values():
            assert all(min(cost.extra_forward_ms, cost.extra_backward_ms) >= 0 for cost in found.treatments)
            assert found.plain.extra_ms == 0
