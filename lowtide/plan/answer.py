"""What a search for the fastest schedule answers."""

from dataclasses import dataclass

from lowtide.plan.modes import PLAIN
from lowtide.plan.predict_step import StepPrediction
from lowtide.plan.schedule import Schedule


@dataclass(frozen=True)
class Alternative:
    """A fixed setting that was compared. cpu_bytes: what would wait in CPU memory."""

    name: str
    peak_bytes: int
    step_ms: float
    cpu_bytes: int


@dataclass(frozen=True)
class Plan:
    """A schedule with what it is predicted to do.

    mode: the fixed setting that it is, if it is one; modes.PLAIN: leave checkpointing off. alternatives: all fixed
    settings. host_limit_bytes: how much may wait in CPU memory; None: no limit. source: where the figures come from
    (costs.MEASURED, costs.FORECAST). states, within_ms: see optimum.Optimum. foreseen: of a plan that has run, whose
    prediction is what was measured, the one before; None: it has not run.
    """

    budget_bytes: int
    schedule: Schedule
    prediction: StepPrediction
    mode: str | None
    alternatives: tuple[Alternative, ...]
    host_limit_bytes: int | None
    source: str
    states: int = 0
    within_ms: float = 0.0
    foreseen: StepPrediction | None = None

    @property
    def leaves_off(self) -> bool:
        return self.mode == PLAIN
