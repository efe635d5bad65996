"""Which plan stays, by what steps are scripted to have taken."""

from collections.abc import Callable

import pytest
import torch

from lowtide import families
from lowtide.auto.measuring import measuring
from lowtide.auto.planner import Planner
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.probe import Probed
from lowtide.plan.answer import Plan
from lowtide.plan.costs import MEASURED
from lowtide.plan.schedule import Schedule
from lowtide.plan.solve import smallest_peak, solve


class Scripted:
    """A model on which each schedule takes what ``time_ms`` says."""

    def __init__(self, time_ms: Callable[[Schedule], float]) -> None:
        self.time_ms = time_ms
        self.ran: list[Schedule] = []
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
                steps.send(Probed({}, {}, self.time_ms(self.ran[-1]), None, None))
        except StopIteration:
            assert self.stays is not None
            return self.stays


@pytest.fixture
def planner() -> Planner:
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
    assert scripted.ran.count(first) == 3  # to begin with, once more, from then on


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
