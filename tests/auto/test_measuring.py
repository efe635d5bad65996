"""Which plan stays, by what steps are scripted to have taken."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowtide import families
from lowtide.allocator import SETTINGS, VARIABLES
from lowtide.auto.measuring import _ROUNDS, MOST_STEPS, _Tried, _worth_another_run, measuring
from lowtide.auto.planner import Planner
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.probe import BlockTime, Probed
from lowtide.plan.answer import Plan
from lowtide.plan.assignment import assignment_of, placed
from lowtide.plan.costs import MEASURED, StepCosts
from lowtide.plan.predict_step import predict_schedule
from lowtide.plan.schedule import SELECTIVE, WHOLE, Schedule
from lowtide.plan.solve import smallest_peak, solve
from tests.plan.test_trials import taking


class Scripted:
    """A model on which each schedule takes what ``time_ms`` says. is_crowded: under which schedules the allocator gives
    back what it has cached; None: there is no memory to be seen."""

    def __init__(
        self, time_ms: Callable[[Schedule], float], is_crowded: Callable[[Schedule], bool] | None = None
    ) -> None:
        self.time_ms = time_ms
        self.is_crowded = is_crowded
        self.ran: list[Schedule] = []
        self.steps = 1  # the one that has settled
        self.stays: Plan | None = None

    def run_under(self, schedule: Schedule) -> None:
        self.ran.append(schedule)

    def take(self, plan: Plan, settled: bool) -> None:
        self.run_under(plan.schedule)
        self.stays = plan if settled else None

    def run(self, planner: Planner) -> Plan:
        steps = measuring(planner, self)
        try:
            next(steps)
            while True:
                seen = self.seen(planner, self.ran[-1])
                planner.begin_step()
                self.steps += 1
                steps.send(seen)
        except StopIteration:
            assert self.stays is not None
            return self.stays

    def seen(self, planner: Planner, schedule: Schedule) -> Probed | None:
        if self.is_crowded is None:
            return Probed({}, {}, self.time_ms(schedule), None, None)
        assert planner.costs is not None
        peak_bytes = predict_schedule(planner.costs, schedule).peak_bytes
        retries = int(self.is_crowded(schedule))
        return Probed({}, {}, self.time_ms(schedule), peak_bytes, peak_bytes, retries)


class Watched(Scripted):
    """A model on which steps take what ``true`` says, and its single blocks seem to take what ``believed`` does."""

    def __init__(self, believed: StepCosts, true: StepCosts) -> None:
        super().__init__(lambda schedule: predict_schedule(true, schedule).step_ms)
        self.believed = believed

    def seen(self, planner: Planner, schedule: Schedule) -> Probed:
        times = {}
        for stack, first, name, cost in placed(self.believed, assignment_of(self.believed, schedule)):
            kind = self.believed.kinds[name]
            for index in range(first, first + cost.blocks):
                times[stack, index] = BlockTime(
                    kind.forward_ms + cost.extra_forward_ms / cost.blocks,
                    kind.backward_ms + cost.extra_backward_ms / cost.blocks,
                )
        return Probed(times, {}, self.time_ms(schedule), None, None)


@pytest.fixture
def planner() -> Planner:
    return made_planner()


def made_planner() -> Planner:
    row = families.find("sd3_medium")
    made = Planner(build_model(row, "tiny"), row.stacks, torch.device("cpu"), 2**40, 1, can_move=False)
    made.forecast((), build_inputs(row.tiny, torch.float32))
    assert made.costs is not None
    least, most = smallest_peak(made.costs).peak_bytes, solve(made.costs, 2**40).prediction.peak_bytes
    made.budget_bytes = least + (most - least) // 2
    return made


def test_the_first_plan_stays_where_it_turns_out_to_be_the_quickest(planner: Planner) -> None:
    predicted_ms = planner.plan(careful=True).prediction.step_ms
    first = planner.plan(careful=True).schedule
    scripted = Scripted(lambda schedule: 0.97 * predicted_ms if schedule == first else predicted_ms)
    assert scripted.run(planner).schedule == first
    assert scripted.ran.count(first) == 6  # to begin with, once more, thrice beside others, from then on


def test_the_first_plan_is_not_run_again_where_it_is_far_behind(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.auto.measuring._NOT_FAR", -0.5)  # whatever it is, that is too far
    predicted_ms = planner.plan(careful=True).prediction.step_ms
    first = planner.plan(careful=True).schedule
    scripted = Scripted(lambda schedule: 0.9 * predicted_ms)
    assert scripted.run(planner).schedule != first
    assert scripted.ran.count(first) == 1


def test_a_fixed_setting_stays_where_it_turns_out_to_be_the_quickest(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.auto.measuring._NOT_FAR", 100.0)  # it is predicted to be far behind
    predicted_ms = planner.plan(careful=True).prediction.step_ms

    def fixed(schedule: Schedule) -> bool:
        return all(len(set(stack.words)) == 1 for stack in schedule.stacks.values())

    scripted = Scripted(lambda schedule: 0.5 * predicted_ms if fixed(schedule) else predicted_ms)
    plan = scripted.run(planner)
    assert fixed(plan.schedule) and plan.mode is not None
    assert plan.prediction.peak_bytes <= planner.budget_bytes


@pytest.mark.parametrize(("not_far", "expected"), [(100.0, 2), (-2.0, 0)])
def test_of_fixed_settings_the_two_nearest_are_tried(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, not_far: float, expected: int
) -> None:
    monkeypatch.setattr("lowtide.auto.measuring._NOT_FAR", not_far)
    predicted_ms = planner.plan(careful=True).prediction.step_ms
    with caplog.at_level("INFO", logger="lowtide"):
        Scripted(lambda schedule: predicted_ms).run(planner)
    assert sum("one setting for all blocks" in message for message in caplog.messages) == expected


def test_a_treatment_that_seemed_slow_is_tried_since_it_may_be_quicker(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Selective blocks seem to take a little more than whole ones, and take far less."""
    assert planner.costs is not None
    believed = taking(planner.costs, ffn=8.0, selective=1.25)
    true = taking(believed, selective=0.6)
    with caplog.at_level("INFO", logger="lowtide"):
        stays = Watched(believed, true).run(planner).schedule.stacks["transformer_blocks"]
    assert SELECTIVE in stays.treatments and WHOLE not in stays.treatments
    assert sum("may be quicker than it seems" in message for message in caplog.messages) == 1
    without = made_planner()
    monkeypatch.setattr(without, "hoped_plans", lambda beside: ())
    assert SELECTIVE not in Watched(believed, true).run(without).schedule.stacks["transformer_blocks"].treatments


@pytest.mark.parametrize(
    ("settings", "by", "stays"),
    [
        (None, 0.04, False),
        (None, 0.12, True),
        (SETTINGS, 0.12, True),
        ("expandable_segments:True", 0.12, False),  # with larger pages memory runs out soon after
    ],
)
def test_a_plan_for_which_memory_is_given_back_in_every_step_stays_only_if_it_is_far_quicker(
    settings: str | None, by: float, stays: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if settings is not None:
        monkeypatch.setenv(VARIABLES[0], settings)
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    tried: list[Schedule] = []

    def time_ms(schedule: Schedule) -> float:
        """The third that comes is the quickest."""
        if schedule not in tried:
            tried.append(schedule)
        return predicted_ms * (1 - by * (tried.index(schedule) == 2))

    without = Scripted(time_ms, lambda schedule: False).run(made_planner()).schedule
    assert without == tried[2]
    tried.clear()
    again = Scripted(time_ms, lambda schedule: schedule == without)
    with caplog.at_level("INFO", logger="lowtide"):
        assert (again.run(made_planner()).schedule == without) is stays
    assert any("gave cached memory back in most of these steps" in message for message in caplog.messages)
    tried.clear()
    everywhere = Scripted(time_ms, lambda schedule: True)
    assert everywhere.run(made_planner()).schedule == without  # the quickest, in any case


def test_a_plan_that_does_not_fit_any_more_is_neither_run_again_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    quick = Scripted(lambda schedule: predicted_ms).run(made_planner()).schedule
    planner = made_planner()
    scripted = Scripted(lambda schedule: 0.9 * predicted_ms if schedule == quick else predicted_ms)
    monkeypatch.setattr(planner, "fits", lambda plan: plan.schedule != quick)
    assert scripted.run(planner).schedule != quick
    assert scripted.ran.count(quick) == 1
    nothing = made_planner()
    monkeypatch.setattr(nothing, "fits", lambda plan: False)
    assert Scripted(lambda schedule: predicted_ms).run(nothing).prediction.peak_bytes <= nothing.budget_bytes


@pytest.mark.parametrize("seed", range(6))
def test_it_settles_within_the_steps_that_are_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.auto.measuring._NOT_FAR", 100.0)
    draw = random.Random(seed)
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    scripted = Scripted(lambda schedule: predicted_ms * draw.uniform(0.97, 1.03))
    scripted.run(made_planner())
    assert MOST_STEPS - 32 <= scripted.steps <= MOST_STEPS


def test_a_plan_that_ran_while_the_host_was_busy_runs_again() -> None:
    """The second one takes 14 % longer then, in all of its steps, and 4 % less than others later."""
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    tried: list[Schedule] = []
    steps: list[Schedule] = []

    def time_ms(schedule: Schedule) -> float:
        if schedule not in tried:
            tried.append(schedule)
        steps.append(schedule)
        busy = steps.count(schedule) <= 4
        return predicted_ms * ((1.1 if busy else 0.96) if tried.index(schedule) == 2 else 1.0)

    scripted = Scripted(time_ms)
    stays = scripted.run(made_planner()).schedule
    assert stays == tried[2]
    assert scripted.ran.count(stays) >= 3  # when it was slow, again, from then on


class Incomplete(Scripted):
    """One on which no step is complete that runs again under the quickest of all."""

    def __init__(self, time_ms: Callable[[Schedule], float], quickest: Schedule) -> None:
        super().__init__(time_ms)
        self.quickest = quickest

    def seen(self, planner: Planner, schedule: Schedule) -> Probed | None:
        incomplete = schedule == self.quickest and self.ran.count(schedule) > 1
        return None if incomplete else super().seen(planner, schedule)


def test_a_run_in_which_nothing_was_seen_counts_as_one() -> None:
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    quickest = Scripted(lambda schedule: predicted_ms).run(made_planner()).schedule
    scripted = Incomplete(lambda schedule: predicted_ms * (0.9 if schedule == quickest else 0.92), quickest)
    assert scripted.run(made_planner()).schedule == quickest
    assert 3 <= scripted.ran.count(quickest) <= 1 + len(_ROUNDS) + 1  # at first, again in each round, from then on
    assert any(schedule != quickest and scripted.ran.count(schedule) > 1 for schedule in scripted.ran)


def test_one_lucky_step_of_a_plan_does_not_count() -> None:
    predicted_ms = made_planner().plan(careful=True).prediction.step_ms
    first = made_planner().plan(careful=True).schedule
    steps: list[Schedule] = []

    def time_ms(schedule: Schedule) -> float:
        """The second step of any run of what is no first plan is lucky."""
        steps.append(schedule)
        return predicted_ms * (1.0 if schedule == first else 0.9 if steps.count(schedule) % 4 == 2 else 1.02)

    assert Scripted(time_ms).run(made_planner()).schedule == first


def test_of_plans_that_are_close_those_run_once_more_of_which_all_steps_say_the_best(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, the one in the middle by its own steps was unlucky; the first was lucky, and another is far behind."""
    plan = planner.plan(careful=True)
    said_ms = {"lucky": 104.0, "unlucky": 96.0, "as said": 102.0, "far": 96.0}
    took_ms = {"lucky": 100.0, "unlucky": 103.0, "as said": 102.0, "far": 130.0}
    made = {name: replace(plan, mode=name) for name in said_ms}
    tried = [_Tried(made[name], ((ms,) * 3,)) for name, ms in took_ms.items()]

    def as_it_ran(plan: Plan) -> Plan:
        known = replace(plan.prediction, plain_ms=said_ms[plan.mode or ""] - plan.prediction.added_ms)
        return replace(plan, prediction=known)

    monkeypatch.setattr(planner, "as_it_ran", as_it_ran)
    order = []
    for times, close in ((1, 0.05), (2, 0.01), (2, 0.03)):  # with the second, only one is close
        while (one := _worth_another_run(planner, tried, times, close)) is not None:
            order.append(one.plan.mode)
            tried[tried.index(one)] = replace(one, runs_ms=one.runs_ms + one.runs_ms[:1])
    assert order == ["unlucky", "lucky", "as said"] * 2


def test_a_first_plan_beside_which_nothing_fits_is_measured_too(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.auto.measuring._candidate", lambda *_, **__: None)
    monkeypatch.setattr(planner, "fixed_plans", list)
    first = planner.plan(careful=True)
    scripted = Scripted(lambda schedule: 1234.0)
    stays = scripted.run(planner)
    assert stays.schedule == first.schedule and stays.source == MEASURED
    assert scripted.ran.count(first.schedule) == 3
    assert stays.prediction.step_ms == pytest.approx(1234.0)
