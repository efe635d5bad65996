"""What the planner learns from one step predicts the peaks of others: counted on the CPU, storage by storage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.auto.lying import Lying
from lowtide.auto.planner import Planner
from lowtide.controls import CheckpointConfig
from lowtide.families.row import Stack
from lowtide.handle import attach_as
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import loss_of
from lowtide.measure.probe import Probed, StepProbe
from lowtide.measure.residents import block_gradients, residents
from lowtide.plan.assignment import assignment_of
from lowtide.plan.costs import StepCosts
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import Schedule, mixed
from lowtide.plan.solve import smallest_peak, solve
from lowtide.runtime.resolve import ResolvedStack, resolve
from tests.measure.metering import CountingMeter

CPU = torch.device("cpu")
KEPT = CheckpointConfig(gradient_checkpointing=False)


class Measured:
    """A tiny model, its planner, and steps of it that are watched: where nothing may move, since CPU memory is what is
    counted."""

    def __init__(self, key: str, can_move: bool = False) -> None:
        self.row = families.find(key)
        self.model: nn.Module = build_model(self.row, "tiny").train(self.row.train_mode)
        self.inputs = build_inputs(self.row.tiny, torch.float32)
        self.resident_bytes = residents(self.model, self.inputs).total_bytes
        self.planner = Planner(self.model, self.row.stacks, CPU, 2**40, 1, can_move)
        self.planner.forecast((), self.inputs)
        self.step()
        for _ in range(2):  # gradients are there from now on
            self.planner.begin_step()

    @property
    def costs(self) -> StepCosts:
        assert self.planner.costs is not None
        return self.planner.costs

    def step(self) -> None:
        loss_of(self.model(**self.inputs)).backward()

    def probed(self, schedule: Schedule, each: bool = False) -> Probed:
        """With what lies there throughout added to the peak, as a device's allocator counts it."""
        with attach_as(self.model, KEPT, schedule, self.row.key):
            self.step()  # the first one under a schedule counts bytes
            with CountingMeter() as meter:
                probe = StepProbe(resolve(self.model, self.row.stacks), CPU, meter, each).start()
                self.step()
                seen = probe.stop()
        assert seen is not None and seen.peak_bytes is not None
        return replace(seen, peak_bytes=seen.peak_bytes + self.resident_bytes)

    def errors(self, shares: list[float]) -> list[float]:
        """Predicted over measured activations, less one, of the plans at these shares of the way to the plain run."""
        least, most = smallest_peak(self.costs).peak_bytes, solve(self.costs, 2**40).prediction.peak_bytes
        return [self._error(int(least + share * (most - least)) + 1) for share in shares]

    def _error(self, budget_bytes: int) -> float:
        plan = solve(self.costs, budget_bytes)
        predicted = predict_step(self.costs, assignment_of(self.costs, plan.schedule)).highest.peak_bytes
        measured: Any = self.probed(plan.schedule).peak_bytes
        return (predicted - self.resident_bytes) / (measured - self.resident_bytes) - 1


@pytest.mark.parametrize("key", ["flux1", "sd3_medium", "wan21_1_3b", "stable_cascade_c"])
def test_one_step_teaches_what_others_take(key: str) -> None:
    """The CPU's kernels save other things than a GPU's, for which the forecast is made: there is something to learn."""
    shares = [0.1, 0.5, 1.0]
    measured = Measured(key)
    before = measured.errors(shares)
    sample = measured.planner.sampling()
    assert sample is not None
    seen = measured.probed(sample, each=True)
    assert set(seen.memory) == set(seen.times)
    measured.planner.learn_bytes(sample, seen)
    measured.planner.learn_peak(sample, seen)
    after = measured.errors(shares)
    assert max(map(abs, after)) <= 0.1
    assert sum(map(abs, after)) < sum(map(abs, before))


def test_after_a_step_that_ran_out_of_memory_more_is_left_free_but_what_fits_is_not_refused() -> None:
    planner = Measured("sd3_medium").planner
    assert planner.costs is not None
    least = smallest_peak(planner.costs).peak_bytes
    planner.budget_bytes = least + (solve(planner.costs, 2**40).prediction.peak_bytes - least) * 9 // 10
    peaks = []
    for _ in range(40):
        plan = planner.plan(careful=True)
        peaks.append(plan.prediction.peak_bytes)
        planner.note_failure(plan.schedule)
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[1] > peaks[2]
    assert peaks[-1] == least


def test_a_step_that_ran_out_of_memory_is_told_once() -> None:
    meter = Scripted(0)
    lying = Lying(nn.Linear(2, 2), {}, meter)
    assert not lying.ran_out()
    meter.failed += 2
    assert [lying.ran_out(), lying.ran_out()] == [True, False]


def test_the_largest_error_of_a_schedule_counts_and_another_one_begins_anew() -> None:
    measured = Measured("sd3_medium", can_move=True)
    planner, forecast_bytes = measured.planner, measured.costs.resident_bytes
    first = solve(measured.costs, 2**40).schedule
    second = solve(measured.costs, smallest_peak(measured.costs).peak_bytes + 1).schedule

    def learn(schedule: Schedule, error_bytes: int) -> int:
        whole = replace(measured.costs, resident_bytes=forecast_bytes, in_flight_share=1.0)
        expected = predict_step(whole, assignment_of(whole, schedule)).highest.peak_bytes
        planner.learn_peak(schedule, Probed({}, {}, 1.0, expected + error_bytes, expected + error_bytes + 7))
        return measured.costs.resident_bytes - forecast_bytes

    assert [learn(first, 100), learn(first, 300), learn(first, -50)] == [100, 300, 300]
    assert planner.costs is not None and planner.costs.in_flight_share == 1.0  # nothing moved
    assert [learn(second, -80), learn(second, -50)] == [0, 0]
    whole = replace(planner.costs, in_flight_share=1.0)
    moving_bytes = predict_step(whole, assignment_of(whole, second)).highest.in_flight_bytes
    assert (1 - planner.costs.in_flight_share) * moving_bytes == pytest.approx(50)
    assert planner.costs.in_flight(moving_bytes) == moving_bytes - 50
    larger_bytes = 9 * moving_bytes  # of which only so much is known
    assert planner.costs.in_flight(larger_bytes) == larger_bytes - 50
    assert planner.spare_bytes == 7


def test_plans_like_those_that_ran_leave_less_free() -> None:
    measured = Measured("sd3_medium")
    planner = measured.planner
    planner.budget_bytes = solve(measured.costs, 2**40).prediction.peak_bytes

    def left_free() -> tuple[int, int, int]:
        plans = planner.plan(), planner.fixed_plans()[0], planner.plan(like=True)
        first, fixed, like = (planner.budget_bytes - plan.budget_bytes for plan in plans)
        return first, fixed, like

    def reserve(spare_bytes: int) -> None:
        peak_bytes = planner.plan(like=True).prediction.peak_bytes
        planner.learn_peak(sample, Probed({}, {}, 1.0, peak_bytes, peak_bytes + spare_bytes))

    sample = planner.sampling()
    assert sample is not None
    room_bytes = planner.budget_bytes - measured.costs.resident_bytes
    first, fixed, like = left_free()
    assert first == fixed > like > 0
    assert like == room_bytes // 100
    planner.learn_times(sample, [measured.probed(sample)])
    reserve(500)
    planner.forecast((), measured.inputs)  # begins anew: nothing like it has run
    reserve(300)
    assert (planner.spare_bytes, planner.tried_spare_bytes) == (500, None)
    planner.learn_times(sample, [measured.probed(sample)])
    reserve(200)
    reserve(100)
    assert (planner.spare_bytes, planner.tried_spare_bytes) == (500, 200)
    assert left_free()[0] - left_free()[1] == 300


def test_what_all_plans_took_less_than_predicted_is_room_for_others_like_them() -> None:
    measured = Measured("sd3_medium")
    planner = measured.planner
    sample = planner.sampling()
    assert sample is not None
    planner.learn_times(sample, [measured.probed(sample)])
    plain = solve(measured.costs, 2**40)
    planner.budget_bytes = plain.prediction.peak_bytes
    others = [solve(measured.costs, planner.budget_bytes - less_bytes) for less_bytes in (1, 20_000)]

    def room(over_bytes: int, schedule: Schedule) -> int:
        """After a step that took so much more than predicted."""
        expected = predict_step(measured.costs, assignment_of(measured.costs, schedule)).peak_bytes
        planner.learn_peak(schedule, Probed({}, {}, 1.0, expected + over_bytes, expected + over_bytes))
        return planner.plan(like=True).budget_bytes - before

    before = planner.plan(like=True).budget_bytes
    assert room(-300, plain.schedule) == 300
    assert room(-200, others[0].schedule) == 200
    assert room(-900, others[1].schedule) == 200
    assert room(0, others[1].schedule) == 0  # once it took what was predicted


def test_what_is_yet_to_come_is_no_room_and_no_plan_is_made_for_more_than_may_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states_bytes = 50_000
    measured = Measured("sd3_medium")
    planner = measured.planner
    sample = planner.sampling()
    assert sample is not None and planner._lying is not None
    planner.learn_times(sample, [measured.probed(sample)])
    plain = solve(measured.costs, 2**40)
    planner.budget_bytes = plain.prediction.peak_bytes + states_bytes
    monkeypatch.setattr(planner._lying, "to_come_bytes", lambda: states_bytes)
    planner.begin_step()
    before = planner.plan(like=True).budget_bytes

    def room(less_bytes: int) -> int:
        """After a step that took so much less than predicted, and no states yet."""
        peak_bytes = predict_step(measured.costs, assignment_of(measured.costs, plain.schedule)).peak_bytes
        seen_bytes = peak_bytes - states_bytes - less_bytes
        planner.learn_peak(plain.schedule, Probed({}, {}, 1.0, seen_bytes, seen_bytes))
        return planner.plan(like=True).budget_bytes

    assert room(10_000_000) == planner.budget_bytes > before  # and no more
    planner.ceiling_bytes = before - 1000
    assert planner.plan(like=True).budget_bytes == planner.ceiling_bytes
    planner.ceiling_bytes = None
    assert room(0) == before


def test_a_plan_no_longer_fits_where_more_lies_there_than_when_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured("sd3_medium")
    planner = measured.planner
    plain = solve(measured.costs, 2**40)
    predicted = planner.budget_bytes = plain.prediction.peak_bytes
    other = solve(measured.costs, predicted - 1)
    assert planner.fits(plain) and planner.fits(other)
    planner.learn_peak(plain.schedule, Probed({}, {}, 1.0, predicted + 5, predicted + 5))
    assert not planner.fits(plain)  # it took more
    planner.learn_peak(other.schedule, Probed({}, {}, 1.0, predicted - 100, predicted - 100))
    assert planner.fits(other)
    lying = planner._lying
    assert lying is not None
    now_bytes = lying.now_bytes()
    monkeypatch.setattr(lying, "now_bytes", lambda: now_bytes + 101)
    planner.begin_step()
    assert not planner.fits(other)


def test_a_step_that_failed_under_a_schedule_for_another_forward_says_nothing_of_this_one() -> None:
    planner = Measured("sd3_medium").planner
    assert not planner.note_failure(Schedule({"blocks": mixed(["whole"])}))
    assert planner.ceiling_bytes is None


def test_an_update_before_the_first_forward_counts() -> None:
    row = families.find("sd3_medium")
    planner = Planner(build_model(row, "tiny"), row.stacks, CPU, 2**40, 1, can_move=False)
    planner.note_update()
    planner.forecast((), build_inputs(row.tiny, torch.float32))
    assert planner._lying is not None and planner._lying.updated


def test_a_plan_that_ran_says_what_was_measured() -> None:
    measured = Measured("sd3_medium", can_move=True)
    planner = measured.planner
    plan = solve(measured.costs, smallest_peak(measured.costs).peak_bytes + 1)
    predicted = plan.prediction.peak_bytes
    for error_bytes in (-500, -300, -400):
        planner.learn_peak(plan.schedule, Probed({}, {}, 1.0, predicted + error_bytes, predicted))
    assert planner.as_it_ran(plan).prediction.peak_bytes == predicted - 300
    ran = planner.as_it_ran(plan)
    assert ran.schedule == plan.schedule
    assert ran.foreseen == plan.prediction == planner.as_it_ran(ran).foreseen  # as it was before it ran


def test_what_steps_took_corrects_what_is_said_of_them_and_copies_never_save_time() -> None:
    measured = Measured("sd3_medium", can_move=True)
    planner = measured.planner
    moving = solve(measured.costs, smallest_peak(measured.costs).peak_bytes + 1)
    plain = solve(measured.costs, 2**40)
    assert moving.prediction.copied_bytes > 0 == plain.prediction.copied_bytes

    def predicted() -> tuple[float, float]:
        return tuple(
            predict_step(measured.costs, assignment_of(measured.costs, plan.schedule)).step_ms
            for plan in (plain, moving)
        )

    plain_ms, moving_ms = predicted()
    planner.learn_step(plain, plain_ms)
    assert predicted() == pytest.approx((plain_ms, moving_ms))
    planner.learn_step(moving, 1.1 * moving_ms)
    assert predicted() == pytest.approx((plain_ms, 1.1 * moving_ms), rel=0.02)
    planner.forecast((), measured.inputs)
    planner.learn_step(plain, plain_ms)
    planner.learn_step(moving, 0.9 * moving_ms)
    now_ms = predicted()
    assert now_ms[0] == pytest.approx(plain_ms, rel=0.02)
    assert plain_ms <= now_ms[1] < moving_ms


class Scripted:
    """A meter that says what it is told to."""

    def __init__(self, allocated_bytes: int) -> None:
        self.allocated_bytes = allocated_bytes
        self.failed = 3

    def failures(self) -> int:
        return self.failed

    retries = failures

    def allocated(self) -> int:
        return self.allocated_bytes

    def peak(self) -> int:
        raise AssertionError

    reserved_peak = peak

    def reset(self) -> None:
        raise AssertionError


def test_what_lies_there_is_what_the_device_says_and_what_training_will_put_there() -> None:
    model = nn.Linear(100, 100, bias=False)
    weight_bytes = 40_000
    inputs = {"x": torch.zeros(5, 100)}
    meter = Scripted(weight_bytes + 2_000)
    lying = Lying(model, inputs, meter)
    workspace_bytes = lying.now_bytes() - meter.allocated_bytes - weight_bytes  # a gradient is still to come
    assert workspace_bytes == residents(model, inputs).workspace_bytes
    assert lying.to_come_bytes() == 2 * weight_bytes
    model(inputs["x"]).sum().backward()
    meter.allocated_bytes += weight_bytes + workspace_bytes
    assert lying.now_bytes() == meter.allocated_bytes
    torch.optim.AdamW(model.parameters()).step()
    lying.updated = True
    meter.allocated_bytes += 2 * weight_bytes
    assert (lying.now_bytes(), lying.to_come_bytes()) == (meter.allocated_bytes, 0)
    model.zero_grad(set_to_none=True)
    meter.allocated_bytes -= weight_bytes
    assert lying.now_bytes() == meter.allocated_bytes + weight_bytes


def test_the_peak_of_a_step_is_held_to_what_lay_there_when_it_began() -> None:
    """Optimizer states that came since raise what lies there, and are no error of the prediction."""
    measured = Measured("sd3_medium")
    planner = measured.planner
    meter = Scripted(10**6)
    planner._lying = Lying(measured.model, measured.inputs, meter)
    planner.begin_step()
    planner.begin_step()  # a step runs, which is as predicted, without states
    before = replace(measured.costs, resident_bytes=planner._now_bytes + planner._shared_bytes)
    plan = solve(before, 2**40)
    assert measured.costs.resident_bytes == before.resident_bytes + planner._lying.to_come_bytes()
    meter.allocated_bytes += planner._lying.to_come_bytes()
    planner.note_update()
    planner.begin_step()
    peak_bytes = plan.prediction.highest.peak_bytes
    planner.learn_peak(plan.schedule, Probed({}, {}, 1.0, peak_bytes + 11, peak_bytes + 12))
    assert measured.costs.resident_bytes == meter.allocated_bytes + planner._shared_bytes + 11


@pytest.mark.parametrize("compiled", [False, True])
def test_of_compiled_blocks_all_that_is_in_flight_needs_room(compiled: bool) -> None:
    """Their backward reads at once what they saved."""
    row = families.find("sd3_medium")
    model = build_model(row, "tiny")
    if compiled:
        for block in model.transformer_blocks:
            block.compile(backend="eager")
    planner = Planner(model, row.stacks, torch.device("cpu"), 2**40, 1, can_move=True)
    planner.forecast((), build_inputs(row.tiny, torch.float32))
    assert planner.costs is not None
    reliefs = {cost.relief_bytes for kind in planner.costs.kinds.values() for cost in kind.treatments}
    assert (reliefs == {0}) == compiled


def test_only_where_updates_clear_gradients_their_room_counts_as_free() -> None:
    measured = Measured("sd3_medium")
    planner, model = measured.planner, measured.model
    trained = list(model.parameters())

    def begins(with_gradients: bool) -> bool:
        """A step. Returns whether plans count on the room of gradients."""
        for weight in trained:
            weight.grad = torch.zeros_like(weight) if with_gradients else None
        planner.begin_step()
        return any(measured.costs.gradient_bytes.values())

    assert not begins(False)  # no update was seen: this may be the first of several backwards
    planner.note_update()
    assert not planner.gradients_add_up()
    assert begins(False)
    assert smallest_peak(measured.costs).elsewhere_bytes == measured.costs.resident_bytes
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    assert planner.gradients_add_up()  # and plans are made anew
    assert not planner.gradients_add_up()
    assert not begins(True) and not begins(False)


def test_a_weight_of_several_blocks_has_its_gradient_from_the_last_and_one_used_elsewhere_has_it_before() -> None:
    inner, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    blocks = [nn.Sequential(nn.Linear(4, 4), more) for more in (inner, inner, nn.Linear(4, 4, bias=False), other)]
    head = nn.Linear(4, 4)
    head.weight = other.weight
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": head})
    named = [(f"blocks.{place}", block) for place, block in enumerate(blocks)]
    stack = ResolvedStack("blocks", named, Stack("blocks", ("blocks.*",)), found=True)
    found = block_gradients(model, [stack], {stack.name: ("a", "b", "c", "d")})
    own = 4 * (16 + 4)
    assert found == {"a": own, "b": own + 64, "c": own + 64, "d": own}


def test_how_much_less_room_copies_in_flight_need_is_what_steps_showed_the_least_of_all() -> None:
    measured = Measured("sd3_medium", can_move=True)
    planner, resident_bytes = measured.planner, measured.costs.resident_bytes
    (stack,) = measured.costs.stacks
    depth = len(measured.costs.stacks[stack])
    schedule = Schedule({stack: mixed(["kept+attention"] * (depth - 1) + ["kept"])})
    other = Schedule({stack: mixed(["kept+attention"] * (depth - 2) + ["kept"] * 2)})

    def predicted(of: Schedule = schedule, costs: StepCosts | None = None) -> int:
        assert planner.costs is not None
        costs = costs or planner.costs
        return predict_step(costs, assignment_of(costs, of)).highest.peak_bytes

    def took(peak_bytes: int, of: Schedule = schedule) -> None:
        planner.learn_peak(of, Probed({}, {}, 1.0, peak_bytes, peak_bytes))

    none, all_of_it = (predicted(costs=measured.costs.with_relief(share)) for share in (0.0, 1.0))
    assert none - all_of_it > 2000
    assert predicted() == pytest.approx((none + all_of_it) / 2, abs=2)  # a forecast counts on half of it
    took(all_of_it + 600)  # more of it than that
    assert predicted() == pytest.approx(all_of_it + 600, abs=2)
    took(none - 500)
    assert predicted() == pytest.approx(none - 500, abs=2)
    took(all_of_it, other)  # once there was less
    assert predicted() == pytest.approx(none - 500, abs=2)
    assert planner.costs is not None and planner.costs.in_flight_share == 1.0  # of which others would have less room
    assert measured.costs.resident_bytes == resident_bytes  # others need no more
    took(none + 70)
    assert predicted() == pytest.approx(none + 70, abs=2)
    assert planner.costs.resident_bytes == pytest.approx(resident_bytes + 70, abs=2)


def test_a_plan_fits_if_it_takes_no_more_than_it_did_or_leaves_room_for_what_was_reserved_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured("sd3_medium")
    planner = measured.planner
    plan = solve(measured.costs, 2**40)
    peak_bytes = plan.prediction.peak_bytes
    planner.budget_bytes = peak_bytes + 500
    planner.learn_peak(plan.schedule, Probed({}, {}, 1.0, peak_bytes, peak_bytes + 450))
    lying = planner._lying
    assert lying is not None
    now_bytes = lying.now_bytes()
    for more, fits in ((0, True), (50, True), (51, False)):
        monkeypatch.setattr(lying, "now_bytes", lambda more=more: now_bytes + more)
        planner.begin_step()
        assert planner.fits(plan) is fits, more
    planner.budget_bytes = peak_bytes
    monkeypatch.setattr(lying, "now_bytes", lambda: now_bytes)
    planner.begin_step()
    assert planner.fits(plan)  # as it did


def test_by_how_much_a_plan_took_more_than_predicted_is_left_free_in_those_to_come() -> None:
    """Though other plans ran since, which took what they were to take."""
    measured = Measured("sd3_medium", can_move=True)
    planner = measured.planner
    (stack,) = measured.costs.stacks
    depth = len(measured.costs.stacks[stack])
    first, second = (Schedule({stack: mixed([word] * (depth - 1) + ["kept"])}) for word in ("whole", "ffn"))
    planner.budget_bytes = 2 * solve(measured.costs, 2**40).prediction.peak_bytes

    def took(schedule: Schedule, more_bytes: int) -> None:
        peak_bytes = predict_step(measured.costs, assignment_of(measured.costs, schedule)).highest.peak_bytes
        planner.learn_peak(schedule, Probed({}, {}, 1.0, peak_bytes + more_bytes, peak_bytes + more_bytes))

    def room() -> int:
        """For activations."""
        return planner.plan(like=True).budget_bytes - measured.costs.resident_bytes

    planner._untimed = 0
    took(second, 0)
    before_bytes = room()
    took(first, 5000)
    assert room() == pytest.approx(before_bytes - 5000, abs=100)  # it lies there, by what is known
    took(second, -5000)  # as it was to take before
    assert planner._error_bytes == 0 and room() == pytest.approx(before_bytes - 5000, abs=100)
