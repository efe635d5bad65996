"""What whole steps took under several plans, put down to treatments, to copies and to what is outside of blocks.

Times of single blocks are uncertain: what watches them takes time of its own, and a host that is late once makes a
treatment look slow. A step under a plan is timed as a whole, so a few of them say which treatments were wrong. What is
sought are few numbers (``_PRIORS``) that explain the steps and are no larger than they have to be: the most likely ones
where errors are normal, by linear least squares with a prior (ridge regression).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy
from numpy.typing import NDArray

from lowtide.plan.assignment import Assignment, placed
from lowtide.plan.costs import COPYING, BlockKind, StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import FFN, SELECTIVE, WHOLE

Values = NDArray[numpy.float64]
_OUTSIDE, _COPIES = "outside of blocks", "copies"
_PRIORS = {_OUTSIDE: 0.02, FFN: 0.3, SELECTIVE: 0.3, WHOLE: 0.2, _COPIES: 0.15}
"""By how much each may well be off: of a plain step; of what the treatment adds; of the time of copies on the link,
though nobody waits for them (see ``COPYING``)."""
_LOWEST = numpy.array([-numpy.inf if name == _OUTSIDE else -COPYING if name == _COPIES else -1.0 for name in _PRIORS])
_NOISE = 0.01
"""Of a step's time, that another one of the same takes more or less, at least."""


@dataclass
class Trials:
    """Steps since treatments were timed. timed: the costs as they came out then."""

    timed: StepCosts
    _rows: list[list[float]] = field(default_factory=list)
    _errors_ms: list[float] = field(default_factory=list)
    _noise_ms: list[float] = field(default_factory=list)

    def add(self, assignment: Assignment, step_ms: float, noise_ms: float = 0.0) -> None:
        """assignment: of the costs as they were timed. noise_ms: by how much its time may well be off, as far as that
        was seen."""
        made = predict_step(self.timed, assignment)
        added = dict.fromkeys(_PRIORS, 0.0)
        for _, _, kind, cost in placed(self.timed, assignment):
            if cost.treatment in added:
                added[cost.treatment] += cost.extra_ms - self.timed.kinds[kind].copying_ms(cost)
        added[_OUTSIDE] = self.timed.plain_ms
        added[_COPIES] = 0.0 if self.timed.link is None else self.timed.link.out_ms(made.copied_bytes)
        self._rows.append(list(added.values()))
        self._errors_ms.append(step_ms - made.step_ms)
        self._noise_ms.append(max(_NOISE * step_ms, noise_ms))

    def applied(self, costs: StepCosts) -> StepCosts:
        """These costs, with times as all steps so far have them. Of ``costs`` only the bytes count."""
        return self._with(costs, self._explained()[0])

    def hoped(self, costs: StepCosts) -> Iterator[StepCosts]:
        """``applied``, for each treatment in turn, if that is as much quicker as it may well be after all steps so far
        (by one standard deviation), and everything else what the steps say of it then."""
        values, covariances = self._explained()
        for place, name in enumerate(_PRIORS):
            if name not in (_OUTSIDE, _COPIES) and covariances[place, place] > 0:
                down = covariances[place] / math.sqrt(covariances[place, place])
                yield self._with(costs, numpy.maximum(values - down, _LOWEST))

    def _with(self, costs: StepCosts, values: Values) -> StepCosts:
        found = dict(zip(_PRIORS, map(float, values), strict=True))
        other_ms = max(0.0, self.timed.other_ms + found[_OUTSIDE] * self.timed.plain_ms)
        return replace(
            costs,
            kinds={name: self._kind(self.timed.kinds[name], kind, found) for name, kind in costs.kinds.items()},
            other_ms=other_ms,
        )

    def _kind(self, timed: BlockKind, kind: BlockKind, found: dict[str, float]) -> BlockKind:
        return replace(
            kind,
            forward_ms=timed.forward_ms,
            backward_ms=timed.backward_ms,
            treatments=tuple(self._cost(timed, cost, found) for cost in kind.treatments),
        )

    def _cost(self, kind: BlockKind, cost: TreatmentCost, found: dict[str, float]) -> TreatmentCost:
        """kind: as timed."""
        timed, link = kind.by_way[cost.way], self.timed.link
        times, copying_ms = 1 + found.get(cost.treatment, 0.0), kind.copying_ms(timed)
        more_ms = 0.0 if link is None else found[_COPIES] * link.out_ms(cost.copied_bytes)
        again_ms = max(0.0, timed.extra_backward_ms - copying_ms)
        return replace(
            cost,
            extra_forward_ms=times * timed.extra_forward_ms,
            extra_backward_ms=times * again_ms + max(0.0, copying_ms + more_ms),
        )

    def _explained(self) -> tuple[Values, Values]:
        """Of each of ``_PRIORS``, how much it is more than it was taken for; and how sure that is: covariances, 0 of
        what is at its lowest."""
        free = list(range(len(_PRIORS)))
        names, scales = list(_PRIORS), numpy.array(list(_PRIORS.values()))
        rows = numpy.array(self._rows).reshape(-1, len(names)) * scales
        errors, noise = numpy.array(self._errors_ms), numpy.array(self._noise_ms)
        lowest, values = _LOWEST / scales, numpy.zeros(len(names))
        covariances = numpy.zeros((len(names), len(names)))
        while free:  # what would be below the lowest it can be is held there, and the rest explains what it can
            left = (errors - rows @ values) / noise
            a = numpy.vstack([rows[:, free] / noise[:, None], numpy.eye(len(free))])
            found = numpy.linalg.lstsq(a, numpy.concatenate([left, numpy.zeros(len(free))]), rcond=None)[0]
            below = [place for place, one in zip(free, found, strict=True) if one < lowest[place]]
            if not below:
                values[free] = found
                covariances[numpy.ix_(free, free)] = numpy.linalg.inv(a.T @ a)
                break
            for place in below:
                values[place] = lowest[place]
                free.remove(place)
        return values * scales, covariances * numpy.outer(scales, scales)
