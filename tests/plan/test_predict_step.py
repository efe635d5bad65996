"""Time and peak of a step, by hand. A byte takes a ms of the link each way, a block 4 ms forward and 8 ms backward."""

from dataclasses import replace

import pytest

from lowtide.errors import ConfigError
from lowtide.plan import modes
from lowtide.plan.assignment import assignment_of, in_flight_bytes_for, schedule_of
from lowtide.plan.costs import PLAIN, BlockFigures, BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.predict_step import StepPrediction, predict_schedule, predict_step
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SAVED, WHOLE, Schedule, keep_all, mixed, whole_blocks

RATE = 1e3 / 2**30


def _ways(*ways: TreatmentCost) -> tuple[TreatmentCost, ...]:
    return (TreatmentCost(KEPT, kept_bytes=10, working_bytes=2), *ways)


def _moving(copied_bytes: int, extra_forward_ms: float = 0.0) -> TreatmentCost:
    saved = frozenset({SAVED})
    return TreatmentCost(KEPT, saved, 1, extra_forward_ms, 0.0, 1, copied_bytes, 12, copied_bytes)


WHOLE_1 = TreatmentCost(WHOLE, extra_backward_ms=4, kept_bytes=2, working_bytes=11)
WHOLE_2 = TreatmentCost(WHOLE, blocks=2, extra_backward_ms=8, kept_bytes=2, working_bytes=21)


def _costs(*ways: TreatmentCost, depth: int = 4, rate: float = RATE, **more) -> StepCosts:
    kind = BlockKind(4.0, 8.0, _ways(*ways))
    return StepCosts({"b": kind}, {"s": ("b",) * depth}, resident_bytes=100, link=LinkRates(rate, rate), **more)


def _predict(costs: StepCosts, *chosen: TreatmentCost) -> StepPrediction:
    return predict_step(costs, {"s": chosen})


def test_the_plain_run_adds_nothing() -> None:
    costs = _costs(other_ms=5.0)
    made = _predict(costs, *_ways() * 4)
    assert made.step_ms == costs.plain_ms == 5 + 4 * 12
    assert [position.peak_bytes for position in made.positions] == [142, 132, 122, 112]


def test_every_position_of_backward_holds_what_came_before_it() -> None:
    plain = _ways()[0]
    made = _predict(_costs(WHOLE_1, WHOLE_2), WHOLE_2, WHOLE_1, plain)
    assert [(p.first, p.blocks, p.word) for p in made.positions] == [(3, 1, "kept"), (2, 1, "whole"), (0, 2, "whole")]
    assert [p.held_bytes for p in made.positions] == [114, 104, 102]
    assert [p.peak_bytes for p in made.positions] == [116, 115, 123]
    assert made.peak_bytes == 123 and made.highest.first == 0
    assert made.extra_ms == 12 and made.step_ms == 4 * 12 + 12


def test_the_peak_may_be_elsewhere() -> None:
    assert _predict(_costs(elsewhere_bytes=500), *_ways() * 4).peak_bytes == 500


def test_where_less_is_brought_back_ahead_less_counts_in_backward() -> None:
    moving = _moving(20)
    costs, chosen = _costs(moving, depth=3), {"s": (moving, moving, _ways()[0])}
    usual, less, more = (predict_step(costs, chosen, most_bytes) for most_bytes in (None, 8, 1000))
    assert more == usual
    assert [p.in_flight_bytes for p in less.positions] == [8 * bool(p.in_flight_bytes) for p in usual.positions]
    assert usual.peak_bytes - less.peak_bytes == 20 - 8
    assert less.exposed_out_ms == usual.exposed_out_ms > 0
    narrow = replace(schedule_of(chosen), prefetch_bytes=8)
    assert predict_schedule(costs, narrow) == less and predict_schedule(costs, schedule_of(chosen)) == usual


def test_bytes_in_flight_count_at_every_position() -> None:
    moving = _moving(3)
    made = _predict(_costs(moving), moving, *_ways() * 3)
    assert [p.in_flight_bytes for p in made.positions] == [3] * 4
    assert made.positions[-1].peak_bytes == 100 + 1 + 12 + 3


def test_bytes_in_flight_need_no_room_of_what_backward_is_through_with_when_they_come() -> None:
    """Of what moves, and of what runs last; of other blocks that stay, all is still there."""
    plain, moving = replace(_ways()[0], relief_bytes=1), replace(_moving(3), relief_bytes=2)
    attention = replace(moving, moves=frozenset({ATTENTION}))
    costs = _costs(moving)
    costs = replace(costs, kinds={"b": replace(costs.kinds["b"], treatments=(plain, moving, attention))})
    reaching, not_reaching = _predict(costs, attention, plain, moving, plain), _predict(costs, *[moving, plain] * 2)
    assert [p.in_flight_bytes for p in reaching.positions] == [2, 1, 3, 1]
    assert [p.in_flight_bytes for p in not_reaching.positions] == [3, 1, 3, 1]  # it wakes as soon as it is reached
    assert all(p.peak_bytes == p.held_bytes + p.working_bytes + p.in_flight_bytes for p in reaching.positions)


def test_gradients_that_backward_has_yet_to_make_leave_their_room_to_what_is_kept() -> None:
    """They are among the residents; at the end, and in an update, all of them are there."""
    costs = _costs(WHOLE_2).with_gradients({"b": 7})
    kind = costs.kinds["b"]
    assert [cost.gradient_bytes for cost in kind.treatments] == [7, 14]
    plain, pair = kind.treatments
    made = predict_step(costs, {"s": (pair, plain, plain)})
    assert [p.held_bytes for p in made.positions] == [100 + 2 + 20 - 28, 100 + 2 + 10 - 21, 100 + 2 - 14]
    assert [p.working_bytes for p in made.positions] == [2 + 7, 2 + 7, 21 + 14]
    assert made.peak_bytes == 123
    assert predict_step(costs, {"s": (plain,) * 4}).peak_bytes == 100 + 40 + 2 - 28 + 7
    assert made.elsewhere_bytes == costs.resident_bytes


def test_there_is_no_relief_beyond_the_working_set() -> None:
    moving = replace(_moving(20), relief_bytes=15)
    made = _predict(_costs(moving), moving, *_ways() * 3)
    assert made.positions[-1].in_flight_bytes == 20 - moving.working_bytes


@pytest.mark.parametrize(
    ("copied", "exposed"),
    [
        ((12, 0, 0, 0), 0),  # three blocks follow the first one: 12 ms
        ((13, 0, 0, 0), 1),
        ((6, 6, 2, 0), 2),
        ((0, 0, 12, 0), 0),  # within a run copies count as spread evenly
    ],
)
def test_copies_out_hide_behind_the_computation_after_the_first_block(copied: tuple[int, ...], exposed: int) -> None:
    moving = [_moving(size_bytes) if size_bytes else _ways()[0] for size_bytes in copied]
    ways = {cost.way: cost for cost in moving if cost.moves}.values()
    made = _predict(_costs(*ways), *moving)
    assert made.exposed_out_ms == pytest.approx(exposed)


def test_what_takes_longer_in_forward_hides_more() -> None:
    moving = _moving(6, extra_forward_ms=1.0)
    made = _predict(_costs(moving), moving, moving, moving, _ways()[0])
    assert made.exposed_out_ms == pytest.approx(18 - 12 - 3) and made.extra_ms == 3


@pytest.mark.parametrize(("depth_of_rest", "exposed"), [(1, 20 - 8 - 4), (2, 20 - 8 - 8), (5, 20 - 8 - 10)])
def test_a_run_leaves_copies_to_the_next_one_up_to_the_bytes_in_flight(depth_of_rest: int, exposed: int) -> None:
    moving = _moving(10)
    kind, other = BlockKind(4.0, 20.0, _ways(moving)), BlockKind(4.0, 20.0, _ways())
    stacks = {"s": ("a",) * 3, "t": ("b",) * depth_of_rest}
    costs = StepCosts({"a": kind, "b": other}, stacks, resident_bytes=0, link=LinkRates(RATE, RATE))
    made = predict_step(costs, {"s": (moving, moving, _ways()[0]), "t": _ways() * depth_of_rest})
    assert made.exposed_out_ms == pytest.approx(exposed)


def test_copies_back_must_fit_beside_the_backward_of_one_treatment() -> None:
    moving = _moving(11)
    made = _predict(_costs(moving, depth=9), moving, moving, *_ways() * 7)
    assert made.exposed_out_ms == 0
    assert made.exposed_back_ms == pytest.approx(2 * 3)
    assert made.step_ms == pytest.approx(9 * 12 + 6)


def test_more_than_an_eighth_is_never_added_to_the_bytes_in_flight() -> None:
    rounded = [in_flight_bytes_for(size_bytes) for size_bytes in range(2000)]
    assert all(size <= bound <= size * 9 / 8 for size, bound in enumerate(rounded))
    assert rounded == sorted(rounded) and len(set(rounded)) < 80
    assert all(in_flight_bytes_for(bound) == bound for bound in rounded)


# ---------------------------------------------------------------------- schedules


def test_a_schedule_and_its_costs_stand_for_each_other() -> None:
    moving = TreatmentCost(WHOLE, frozenset({BOUNDARY}), 2, 0.0, 8.0, 0, 2, 21, 2)
    costs = _costs(WHOLE_1, WHOLE_2, moving, depth=6)
    assignment = {"s": (moving, WHOLE_2, WHOLE_1, _ways()[0])}
    schedule = schedule_of(assignment)
    assert schedule.stacks["s"].segments == (0, 0, 1, 1, 2, None)
    assert schedule.stacks["s"].moves[:3] == (frozenset({BOUNDARY}),) * 2 + (frozenset(),)
    assert assignment_of(costs, schedule) == assignment


def test_what_is_treated_last_counts_as_staying() -> None:
    moving = TreatmentCost(WHOLE, frozenset({BOUNDARY}), 1, 0.0, 4.0, 0, 2, 11, 2)
    costs = _costs(WHOLE_1, moving)
    found = assignment_of(costs, Schedule({"s": whole_blocks(4).moving(BOUNDARY)}))
    assert found == {"s": (moving, moving, moving, WHOLE_1)}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Schedule({"s": mixed(["kept", "ffn", "kept", "kept"])}),
            "no costs are known for ffn on 1 blocks from block 1",
        ),
        (Schedule({"s": whole_blocks(4, 3)}), "whole on 3 blocks from block 0 of stack 's'"),
        (Schedule({"s": keep_all(3)}), r"for stacks \{'s': 3\}, but the costs are for \{'s': 4\}"),
    ],
)
def test_a_schedule_without_known_costs_is_an_error(schedule: Schedule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assignment_of(_costs(WHOLE_1, WHOLE_2), schedule)


def test_every_fixed_setting_is_the_schedule_that_the_controls_make() -> None:
    moving = TreatmentCost(WHOLE, frozenset({BOUNDARY}), 1, 0.0, 4.0, 0, 2, 11, 2)
    costs = _costs(WHOLE_1, WHOLE_2, moving, depth=7)
    found = dict(modes.assignments(costs))
    assert list(found) == [modes.PLAIN, "torch", "unsloth", "torch, interval 2", "torch, interval 2, stride 4"]
    assert found["unsloth"]["s"] == (moving,) * 6 + (WHOLE_1,)
    for name, schedule in {
        modes.PLAIN: keep_all(7),
        "torch": whole_blocks(7),
        "torch, interval 2": whole_blocks(7, 2),
        "torch, interval 2, stride 4": whole_blocks(7, 2, 4),
    }.items():
        assert found[name] == assignment_of(costs, Schedule({"s": schedule})), name


def test_a_block_without_a_feed_forward_is_kept_by_the_settings_for_feed_forwards() -> None:
    ffn = TreatmentCost(FFN, extra_backward_ms=1, kept_bytes=5, working_bytes=6)
    kinds = {"a": BlockKind(4.0, 8.0, _ways(ffn)), "b": BlockKind(4.0, 8.0, _ways())}
    found = dict(modes.assignments(StepCosts(kinds, {"s": ("a", "b")}, resident_bytes=0)))
    assert found["torch-ffn"] == {"s": (ffn, _ways()[0])}


# ---------------------------------------------------------------------- costs


def test_costs_come_from_figures_and_noise_is_no_gain() -> None:
    kind = BlockKind.from_figures(
        {
            PLAIN: BlockFigures(4.0, 8.0, 10, working_bytes=2),
            (WHOLE, frozenset(), 2): BlockFigures(7.9, 24.5, 2, working_bytes=21),
            (KEPT, frozenset({ATTENTION}), 1): BlockFigures(4.5, 8.0, 4, cpu_bytes=6, working_bytes=9),
        }
    )
    assert kind.plain == _ways()[0]
    whole = kind.by_way[WHOLE, frozenset(), 2]
    assert (whole.extra_forward_ms, whole.extra_backward_ms) == (0.0, 8.5)
    moving = kind.by_way[KEPT, frozenset({ATTENTION}), 1]
    assert (moving.extra_ms, moving.cpu_bytes, moving.copied_bytes) == (0.5, 6, 6)


def test_a_calibration_moves_the_peak_by_the_error() -> None:
    costs = _costs()
    made = _predict(costs, *_ways() * 4)
    again = _predict(costs.calibrated(made.peak_bytes, 150), *_ways() * 4)
    assert (made.peak_bytes, again.peak_bytes) == (142, 150)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: TreatmentCost("recompute"), "unknown treatment 'recompute'"),
        (lambda: TreatmentCost(WHOLE, frozenset({SAVED})), "of a whole block can move boundary"),
        (lambda: TreatmentCost(FFN, blocks=2), "a segment of 2 blocks"),
        (lambda: TreatmentCost(WHOLE, cpu_bytes=1, copied_bytes=1), "1 bytes in CPU memory, 1 bytes copied"),
        (lambda: TreatmentCost(WHOLE, kept_bytes=-1), "kept_bytes: -1 is no amount"),
        (lambda: BlockKind(1.0, float("nan"), _ways()), "backward_ms: nan is no amount"),
        (lambda: BlockKind(1.0, 1.0, (WHOLE_1,)), "needs the cost of keeping it"),
        (lambda: BlockKind(1.0, 1.0, _ways(WHOLE_1, WHOLE_1)), "two costs for one way"),
        (lambda: LinkRates(0.0, 1.0), "two rates above 0"),
        (lambda: StepCosts({}, {"s": ()}, 0), "nothing to plan"),
        (lambda: StepCosts({}, {"s": ("b",)}, 0), "kind 'b', which has no costs"),
    ],
)
def test_costs_that_cannot_be_are_refused(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
