"""A step that samples treatments: within the budget, with each treatment on each kind; and what is learnt of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.plan.assignment import assignment_of, schedule_of
from lowtide.plan.costs import MEASURED, BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_step
from lowtide.plan.sampling import (
    Sample,
    bytes_of,
    corrected,
    samples_of,
    sampling,
    with_bytes,
)
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SAVED, SELECTIVE, WHOLE
from lowtide.plan.solve import smallest_peak
from tests.plan.chains import steps

MOVED = frozenset({BOUNDARY})


def kind(ms: float, *, ffn: bool = True) -> BlockKind:
    """Of this many ms forward, twice as many backward; recomputation takes what it recomputes."""
    ways = [
        TreatmentCost(KEPT, kept_bytes=10, working_bytes=2),
        TreatmentCost(WHOLE, extra_backward_ms=ms, kept_bytes=2, working_bytes=11),
        TreatmentCost(WHOLE, MOVED, extra_backward_ms=ms, cpu_bytes=2, working_bytes=13, copied_bytes=2),
        TreatmentCost(WHOLE, blocks=2, extra_backward_ms=2 * ms, kept_bytes=2, working_bytes=21),
        TreatmentCost(SELECTIVE, extra_backward_ms=0.8 * ms, kept_bytes=3, working_bytes=11),
    ]
    more = [TreatmentCost(FFN, extra_backward_ms=0.5 * ms, kept_bytes=5, working_bytes=7)] if ffn else []
    return BlockKind(ms, 2 * ms, (*ways, *more))


COSTS = StepCosts(
    {"a": kind(4.0), "b": kind(2.0, ffn=False)},
    {"s": ("a",) * 12, "t": ("b",) * 8},
    resident_bytes=100,
    link=LinkRates(1.0, 1.0),
)


def test_each_treatment_runs_on_blocks_of_each_kind() -> None:
    made = sampling(COSTS, 10_000)
    assert made is not None
    treatments = {stack: [cost.treatment for cost in chosen] for stack, chosen in made.items()}
    assert {t: treatments["s"].count(t) for t in set(treatments["s"])} == {KEPT: 3, FFN: 3, SELECTIVE: 3, WHOLE: 3}
    assert {t: treatments["t"].count(t) for t in set(treatments["t"])} == {KEPT: 2, SELECTIVE: 2, WHOLE: 4}
    assert assignment_of(COSTS, schedule_of(made)) == made


@given(steps(), st.integers(0, 400))
def test_it_fits_or_there_is_none(costs: StepCosts, budget_bytes: int) -> None:
    made = sampling(costs, budget_bytes)
    if made is None:
        return
    prediction = predict_step(costs, made)
    assert prediction.peak_bytes <= budget_bytes
    assert costs.host_limit_bytes is None or prediction.cpu_bytes <= costs.host_limit_bytes
    schedule_of(made)  # attach takes it


def test_a_tight_budget_leaves_out_what_does_not_fit() -> None:
    least = predict_step(COSTS, sampling(COSTS, 10_000) or {}).peak_bytes
    made = sampling(COSTS, 150)
    assert made is not None and least > 150
    assert sampling(COSTS, 100) is None
    counted = [cost.treatment for chosen in made.values() for cost in chosen]
    assert counted.count(WHOLE) > 11


def test_what_fits_only_with_what_it_keeps_in_cpu_memory_is_sampled_so() -> None:
    moving = TreatmentCost(SELECTIVE, MOVED, extra_backward_ms=3.0, cpu_bytes=3, working_bytes=11, copied_bytes=3)
    a = COSTS.kinds["a"]
    costs = replace(COSTS, kinds={**COSTS.kinds, "a": replace(a, treatments=(*a.treatments, moving))})
    made, before = sampling(costs, 116), sampling(COSTS, 116)
    assert made is not None and before is not None
    assert made["s"].count(moving) == 3 and all(cost.treatment == WHOLE for cost in before["s"])
    attention = replace(moving, moves=frozenset({ATTENTION}))
    wide = replace(costs, kinds={**costs.kinds, "a": replace(a, treatments=(*a.treatments, attention))})
    told = bytes_of(wide, {**made, "s": (attention, *made["s"][1:])}, {("s", 0): (0, 99), ("s", 1): (2, 15)})
    assert [(one.treatment, one.error_bytes) for one in told] == [(WHOLE, 2)]  # of the second block alone
    slow = replace(costs, link=LinkRates(3 / 2**30 * 1000 / 2.1, 1.0))  # its copy takes more than half of a forward
    assert sampling(slow, 116) == sampling(replace(COSTS, link=slow.link), 116)
    still = sampling(replace(costs, link=None), 10_000)
    assert still is not None and not any(cost.moves for chosen in still.values() for cost in chosen)


def test_where_whole_blocks_do_not_fit_all_that_is_saved_moves() -> None:
    moving = TreatmentCost(KEPT, frozenset({SAVED}), cpu_bytes=4, working_bytes=2, copied_bytes=4)
    kinds = {}
    for name, kind in COSTS.kinds.items():
        plain, *others = kind.treatments
        ways = (plain, *(replace(cost, working_bytes=90) for cost in others), moving)
        kinds[name] = replace(kind, treatments=ways)
    made = sampling(replace(COSTS, kinds=kinds), 130)
    assert made is not None and moving in made["s"] and moving in made["t"]
    assert all(cost.treatment == KEPT for chosen in made.values() for cost in chosen)


@pytest.mark.parametrize("room", [160, 200])
def test_where_only_what_runs_last_does_not_fit_recomputed_it_is_kept(room: int) -> None:
    """It needs 150 bytes beside what comes back for the one before it, whose input is 10."""
    ways = (
        TreatmentCost(KEPT, kept_bytes=100, working_bytes=10),
        TreatmentCost(KEPT, frozenset({SAVED}), cpu_bytes=100, copied_bytes=100, working_bytes=30),
        TreatmentCost(WHOLE, extra_backward_ms=4.0, kept_bytes=10, working_bytes=150),
        TreatmentCost(WHOLE, MOVED, extra_backward_ms=4.0, cpu_bytes=10, copied_bytes=10, working_bytes=150),
    )
    link = LinkRates(1e3 / 2**30 / 0.2, 1e3 / 2**30 / 0.2)
    costs = StepCosts({"a": BlockKind(4.0, 8.0, ways)}, {"s": ("a",) * 10}, resident_bytes=0, link=link)
    made = sampling(costs, room)
    assert made is not None and smallest_peak(costs).peak_bytes == 160
    assert [cost.treatment for cost in made["s"]] == [WHOLE] * 9 + [KEPT if room == 160 else WHOLE]


def test_what_keeps_least_is_sampled_first() -> None:
    """Else one kept block takes the room, and nothing is learnt of the others."""
    for room in range(150, 190):
        made = sampling(replace(COSTS, link=None), room)
        counted = [] if made is None else [cost.treatment for cost in made["s"]]
        assert counted.count(SELECTIVE) >= counted.count(FFN) >= counted.count(KEPT)


def truth(times: float) -> StepCosts:
    """A device that is slower by so much, and on which feed-forwards take twice as long again."""
    kinds = {
        name: BlockKind(
            k.forward_ms * times,
            k.backward_ms * times,
            tuple(
                replace(cost, extra_backward_ms=cost.extra_backward_ms * times * (2 if cost.treatment == FFN else 1))
                for cost in k.treatments
            ),
        )
        for name, k in COSTS.kinds.items()
    }
    return replace(COSTS, kinds=kinds, other_ms=7.0, source=MEASURED)


@pytest.mark.parametrize("times", [0.3, 1.0, 5.0])
def test_measured_times_take_the_place_of_forecasts(times: float) -> None:
    real, made = truth(times), sampling(COSTS, 10_000)
    assert made is not None
    seen = {}
    for stack, chosen in made.items():
        for index, cost in enumerate(chosen):
            block = real.kinds[COSTS.stacks[stack][index]]
            there = block.by_way[cost.way]
            seen[stack, index] = (block.forward_ms, block.backward_ms + there.extra_backward_ms)
    learnt = corrected(COSTS, list(samples_of(COSTS, made, seen)), 7.0, COSTS.link)
    assert learnt.source == MEASURED
    for name, expected in real.kinds.items():
        found = learnt.kinds[name]
        assert (found.forward_ms, found.backward_ms) == pytest.approx((expected.forward_ms, expected.backward_ms))
        for way, cost in expected.by_way.items():
            assert found.by_way[way].extra_ms == pytest.approx(cost.extra_ms), way
    assert learnt.plain_ms == pytest.approx(real.plain_ms)


def test_what_was_not_sampled_is_corrected_as_like_things_turned_out() -> None:
    """Kind b was never seen; a was twice as slow as forecast, its recomputation three times."""
    samples = [Sample("a", KEPT, 8.0, 16.0), Sample("a", WHOLE, 8.0, 16.0 + 12.0)]
    learnt = corrected(COSTS, samples, 0.0, None)
    b = learnt.kinds["b"]
    assert (b.forward_ms, b.backward_ms) == pytest.approx((4.0, 8.0))
    assert b.by_way[WHOLE, frozenset(), 1].extra_ms == pytest.approx(3 * 2.0)
    assert b.by_way[WHOLE, frozenset(), 2].extra_ms == pytest.approx(3 * 4.0)
    assert b.by_way[SELECTIVE, frozenset(), 1].extra_ms == pytest.approx(2 * 1.6)  # as slow as plain blocks
    assert learnt.link is None


@pytest.mark.parametrize("seen", [(WHOLE,), (SELECTIVE,), (WHOLE, SELECTIVE), (FFN, WHOLE, SELECTIVE)])
def test_where_no_plain_block_ran_its_time_is_what_the_others_took_without_recomputation(seen: tuple[str, ...]) -> None:
    """All is three times slower than forecast: nothing else would explain what was seen."""
    a = COSTS.kinds["a"]
    extra_ms = {treatment: a.by_way[treatment, frozenset(), 1].extra_ms for treatment in seen}
    samples = [Sample("a", treatment, 3 * 4.0, 3 * (8.0 + ms)) for treatment, ms in extra_ms.items()]
    learnt = corrected(COSTS, samples, 0.0, COSTS.link)
    for name, kind in COSTS.kinds.items():
        found = learnt.kinds[name]
        assert (found.forward_ms, found.backward_ms) == pytest.approx((3 * kind.forward_ms, 3 * kind.backward_ms))
        for way, cost in kind.by_way.items():
            assert found.by_way[way].extra_ms == pytest.approx(3 * cost.extra_ms), way


def test_what_copies_take_though_they_hide_stays_a_forecast() -> None:
    """Of what was sampled, and of what was not, whose recomputation turned out as slow as like one."""
    slow = {name: replace(k, treatments=tuple(map(copying, k.treatments))) for name, k in COSTS.kinds.items()}
    costs = replace(COSTS, kinds=slow)
    learnt = corrected(costs, [Sample("a", KEPT, 8.0, 16.0), Sample("a", WHOLE, 8.0, 16.0 + 12.0)], 0.0, COSTS.link)
    for name, again_ms in (("a", 12.0), ("b", 3 * 2.0)):
        ways = learnt.kinds[name].by_way
        assert ways[WHOLE, frozenset(), 1].extra_ms == pytest.approx(again_ms)
        assert ways[WHOLE, MOVED, 1].extra_ms == pytest.approx(again_ms + 0.5)


def copying(cost: TreatmentCost) -> TreatmentCost:
    """The same, where copies take half a millisecond though they hide."""
    return replace(cost, extra_backward_ms=cost.extra_backward_ms + 0.5) if cost.moves else cost


def test_what_came_out_faster_than_a_plain_block_takes_no_extra_time() -> None:
    learnt = corrected(COSTS, [Sample("a", KEPT, 4.0, 8.0), Sample("a", FFN, 3.9, 7.0)], 0.0, COSTS.link)
    assert learnt.kinds["a"].by_way[FFN, frozenset(), 1].extra_ms == 0.0


def test_measured_bytes_take_the_place_of_forecasts() -> None:
    """A whole block needs 5 bytes more than was thought, alone, with its input moved, or with a neighbour."""
    made = sampling(COSTS, 10_000)
    assert made is not None
    memory = {}
    for stack, chosen in made.items():
        for index, cost in enumerate(chosen):
            more = 5 if cost.treatment == WHOLE else 0
            memory[stack, index] = (cost.kept_bytes + 1, cost.working_bytes + more)
    learnt = with_bytes(COSTS, list(bytes_of(COSTS, made, memory)))
    for name, kind in learnt.kinds.items():
        for way, cost in kind.by_way.items():
            before = COSTS.kinds[name].by_way[way]
            assert cost.working_bytes - before.working_bytes == (5 if cost.treatment == WHOLE else 0)
            seen = way in {c.way for stack, chosen in made.items() if COSTS.stacks[stack][0] == name for c in chosen}
            assert cost.kept_bytes - before.kept_bytes == (seen and not cost.moves)
            assert (cost.cpu_bytes, cost.copied_bytes, cost.extra_ms) == (
                before.cpu_bytes,
                before.copied_bytes,
                before.extra_ms,
            )


def test_a_selective_block_that_was_not_seen_works_on_what_a_whole_one_does() -> None:
    """Where its attention side moves, say: how much of it was back is chance. Other kinds stay."""
    memory = {("s", 0): (10, 2 + 1), ("s", 1): (2, 11 - 5)}
    made = {"s": (COSTS.kinds["a"].plain, COSTS.kinds["a"].by_way[WHOLE, frozenset(), 1]), "t": ()}
    learnt = with_bytes(COSTS, list(bytes_of(COSTS, made, memory)))
    more = {
        (name, cost.treatment): cost.working_bytes - COSTS.kinds[name].by_way[way].working_bytes
        for name, kind in learnt.kinds.items()
        for way, cost in kind.by_way.items()
    }
    assert more == {("a", KEPT): 1, ("a", WHOLE): -5, ("a", SELECTIVE): -5, ("a", FFN): 0} | {
        ("b", treatment): 0 for treatment in (KEPT, WHOLE, SELECTIVE)
    }
    assert learnt.kinds["a"].by_way[SELECTIVE, frozenset(), 1].kept_bytes == 3
