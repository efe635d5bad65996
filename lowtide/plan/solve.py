"""The fastest schedule within a budget, beside every fixed setting, "leave it off" among them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.plan import modes
from lowtide.plan.answer import Alternative, Plan
from lowtide.plan.assignment import Assignment, schedule_of
from lowtide.plan.costs import StepCosts
from lowtide.plan.optimum import quickest, smallest
from lowtide.plan.predict_step import StepPrediction, predict_step
from lowtide.units import format_bytes


def solve(costs: StepCosts, budget_bytes: int) -> Plan:
    """The schedule of least predicted time whose predicted peak is within the budget.

    The best over all treatments of all blocks (plan.search says why), so more budget never makes it slower, unless
    ``within_ms`` says that the search was stopped. The plain run is taken whenever it fits, and a fixed setting before
    a schedule that is no faster, the simplest first. Raises ConfigError where nothing fits, with the smallest peak that
    can be reached.
    """
    fixed = _fixed(costs)
    least = _smallest(costs)
    if not least.prediction.fits(budget_bytes, costs.host_limit_bytes):
        raise ConfigError(_nothing_fits(costs, least.prediction, budget_bytes))
    candidates = [*fixed, least]
    best = min(
        (candidate for candidate in candidates if candidate.prediction.fits(budget_bytes, costs.host_limit_bytes)),
        key=lambda candidate: candidate.prediction.added_ms if candidate.name != modes.PLAIN else -1.0,
    )
    states, within_ms = 0, 0.0
    if best.name != modes.PLAIN:
        found = quickest(costs, budget_bytes, best.prediction.added_ms)
        states, within_ms = found.states, found.within_ms
        if found.assignment is not None:
            best = _Candidate(found.assignment, predict_step(costs, found.assignment))
    return _plan(costs, budget_bytes, best, fixed, states, within_ms)


def fixed_plans(costs: StepCosts, budget_bytes: int) -> list[Plan]:
    """Each fixed setting that fits, as a plan; the quickest by prediction first."""
    fixed = _fixed(costs)
    fitting = [candidate for candidate in fixed if candidate.prediction.fits(budget_bytes, costs.host_limit_bytes)]
    fitting.sort(key=lambda candidate: candidate.prediction.step_ms)
    return [_plan(costs, budget_bytes, candidate, fixed) for candidate in fitting]


def _fixed(costs: StepCosts) -> list["_Candidate"]:
    return [_Candidate(made, predict_step(costs, made), name) for name, made in modes.assignments(costs)]


def _plan(
    costs: StepCosts,
    budget_bytes: int,
    chosen: "_Candidate",
    fixed: Sequence["_Candidate"],
    states: int = 0,
    within_ms: float = 0.0,
) -> Plan:
    return Plan(
        budget_bytes,
        schedule_of(chosen.assignment),
        chosen.prediction,
        chosen.name,
        tuple(_alternative(candidate) for candidate in fixed),
        costs.host_limit_bytes,
        costs.source,
        states,
        within_ms,
    )


def smallest_peak(costs: StepCosts) -> StepPrediction:
    """The step with the lowest peak of all schedules, whatever time it takes."""
    return _smallest(costs).prediction


def _smallest(costs: StepCosts) -> "_Candidate":
    assignment = smallest(costs)
    return _Candidate(assignment, predict_step(costs, assignment))


@dataclass(frozen=True)
class _Candidate:
    """name: of the fixed setting that it is, if it is one."""

    assignment: Assignment
    prediction: StepPrediction
    name: str | None = None


def _alternative(candidate: _Candidate) -> Alternative:
    made = candidate.prediction
    return Alternative(candidate.name or "", made.peak_bytes, made.step_ms, made.cpu_bytes)


def _nothing_fits(costs: StepCosts, smallest: StepPrediction, budget_bytes: int) -> str:
    least, budget = (f"{format_bytes(size)} ({size} bytes)" for size in (smallest.peak_bytes, budget_bytes))
    text = f"no schedule fits in {budget}: the smallest peak that can be reached is {least}"
    if costs.elsewhere_bytes >= smallest.highest.peak_bytes:
        return f"{text}, and it is reached outside of the blocks, where no schedule lowers it"
    residents = format_bytes(costs.resident_bytes)
    return (
        f"{text}, of which {residents} are there whatever is done (weights, gradients, optimizer states and the like)"
    )
