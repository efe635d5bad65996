"""Time of a step, and peak at every position of backward, under given treatments. Pure arithmetic.

Memory. Backward runs from the last block to the first, so while it is at a treatment, what this one and all before it
in the forward keep is on the device, and what came after is gone::

    peak = residents + kept, up to and with this one + its working set + copies in flight

Where weights have no gradients before backward makes them, those of the treatments that it has yet to come to take off
their room among the residents (``TreatmentCost.gradient_bytes``).

Copies in flight are about as many bytes as the largest treatment of the step copies: so much may be on its way out in
forward, and so much is brought back ahead in backward (``Schedule.in_flight_bytes``, ``prefetch_bytes``). They count at
every position, less what its backward is through with by the time they come (``TreatmentCost.relief_bytes``).

Time. Copies run beside the computation, in order, each way on a lane of its own. *Out*, the side that binds: what a run
of like blocks copies hides behind the computation of this run, and what does not fit there is left to the next run, up
to the bytes that may be in flight; more than that is waited for, and so is all that is left at the end of the forward.
The first block of the model hides nothing, as nothing was copied before it. *Back*: backward takes two to three times
as long, and fetches what the next treatment needs while it is at this one. So a treatment waits for what does not fit
beside the plain backward of as many blocks of its kind as it takes.

Within a run copies count as spread evenly, so the order of its treatments does not change the time (``plan.place``
spreads them, as far as the budget allows). Peaks do depend on the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.plan.assignment import Assignment, assignment_of, in_flight_bytes
from lowtide.plan.costs import Run, StepCosts, TreatmentCost
from lowtide.plan.schedule import Schedule


@dataclass(frozen=True)
class Position:
    """Backward at one treatment. stack, first, blocks: its blocks. word: the treatment and what of it moves.

    held_bytes: residents, and what this treatment and those before it in the forward keep, less the gradients that are
    not there yet. working_bytes: with the gradients that it makes.
    """

    stack: str
    first: int
    blocks: int
    word: str
    held_bytes: int
    working_bytes: int
    in_flight_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.working_bytes + self.in_flight_bytes


@dataclass(frozen=True)
class StepPrediction:
    """One step. positions: in the order of backward.

    plain_ms: of a step without checkpointing. extra_ms: what treatments add. exposed_out_ms, exposed_back_ms: waits
    for copies. cpu_bytes: most that waits in CPU memory. elsewhere_bytes: the peak outside of the blocks.
    """

    plain_ms: float
    extra_ms: float
    exposed_out_ms: float
    exposed_back_ms: float
    cpu_bytes: int
    copied_bytes: int
    elsewhere_bytes: int
    positions: tuple[Position, ...]

    @property
    def added_ms(self) -> float:
        """Beside the plain run."""
        return self.extra_ms + self.exposed_out_ms + self.exposed_back_ms

    @property
    def step_ms(self) -> float:
        return self.plain_ms + self.added_ms

    @property
    def peak_bytes(self) -> int:
        return max(self.elsewhere_bytes, self.highest.peak_bytes)

    def fits(self, budget_bytes: int, host_limit_bytes: int | None) -> bool:
        """host_limit_bytes: how much may wait in CPU memory; None: no limit."""
        waits = host_limit_bytes is None or self.cpu_bytes <= host_limit_bytes
        return waits and self.peak_bytes <= budget_bytes

    @property
    def highest(self) -> Position:
        """Where backward needs the most; of equals, the one that it comes to first."""
        return max(self.positions, key=lambda position: position.peak_bytes)


def predict_schedule(costs: StepCosts, schedule: Schedule) -> StepPrediction:
    """A schedule as ``attach`` runs it, with as many bytes brought back ahead as it says. Raises what ``assignment_of``
    does."""
    return predict_step(costs, assignment_of(costs, schedule), schedule.prefetch_bytes)


def predict_step(costs: StepCosts, assignment: Assignment, prefetch_bytes: int | None = None) -> StepPrediction:
    """assignment: treatments of every stack; the last one must not move anything (``assignment.without_last_move``).
    prefetch_bytes: brought back ahead at most; None, or more than that: what ``assignment.schedule_of`` says."""
    in_flight = in_flight_bytes(assignment)
    ahead_bytes = in_flight if prefetch_bytes is None else min(in_flight, prefetch_bytes)
    chosen = [cost for name in costs.stacks for cost in assignment[name]]
    return StepPrediction(
        plain_ms=costs.plain_ms,
        extra_ms=sum(cost.extra_ms for cost in chosen),
        exposed_out_ms=_exposed_out_ms(costs, assignment, in_flight),
        exposed_back_ms=sum(
            exposed_back_ms(costs, run, cost) for run in costs.runs for cost in _treatments_of(run, assignment)
        ),
        cpu_bytes=sum(cost.cpu_bytes for cost in chosen),
        copied_bytes=sum(cost.copied_bytes for cost in chosen),
        elsewhere_bytes=max(costs.elsewhere_bytes, costs.resident_bytes),
        positions=tuple(_positions(costs, assignment, costs.in_flight(ahead_bytes)))[::-1],
    )


def _positions(costs: StepCosts, assignment: Assignment, in_flight_bytes: int) -> Iterator[Position]:
    held_bytes, end = costs.resident_bytes, costs.runs[-1].stack
    reaches_in = any(cost.reaches_in for chosen in assignment.values() for cost in chosen)
    for stack in costs.stacks:
        first = 0
        for number, cost in enumerate(assignment[stack], 1):
            held_bytes += cost.net_bytes
            wakes = reaches_in and stack == end and number == len(assignment[stack])
            beside_bytes = cost.in_flight(in_flight_bytes, wakes)
            yield Position(stack, first, cost.blocks, cost.word, held_bytes, cost.at_work_bytes, beside_bytes)
            first += cost.blocks


@dataclass
class LaneOut:
    """Copies out, in ms of the link. bound_ms: how many may be left from run to run. left_ms: how many are."""

    bound_ms: float
    left_ms: float
    exposed_ms: float = 0.0

    def pass_run(self, net_ms: float, last: bool) -> None:
        """net_ms: copies of the run less its computation."""
        left_ms = max(0.0, self.left_ms + net_ms)
        self.left_ms = 0.0 if last else min(left_ms, self.bound_ms)
        self.exposed_ms += left_ms - self.left_ms


def lane_out(costs: StepCosts, in_flight_bytes: int) -> LaneOut:
    """Before the first run. Without a link, or where nothing moves, it is empty."""
    if costs.link is None or not in_flight_bytes:
        return LaneOut(0.0, 0.0)
    return LaneOut(costs.link.out_ms(in_flight_bytes), costs.kinds[costs.runs[0].kind].forward_ms)


def net_out_ms(costs: StepCosts, run: Run, cost: TreatmentCost) -> float:
    """What a treatment copies out less what it computes in forward."""
    copies_ms = costs.link.out_ms(cost.copied_bytes) if costs.link is not None else 0.0
    return copies_ms - cost.blocks * costs.kinds[run.kind].forward_ms - cost.extra_forward_ms


def exposed_back_ms(costs: StepCosts, run: Run, cost: TreatmentCost) -> float:
    copies_ms = costs.link.back_ms(cost.copied_bytes) if costs.link is not None else 0.0
    return max(0.0, copies_ms - cost.blocks * costs.kinds[run.kind].backward_ms)


def _exposed_out_ms(costs: StepCosts, assignment: Assignment, in_flight_bytes: int) -> float:
    lane = lane_out(costs, in_flight_bytes)
    for run in costs.runs if in_flight_bytes else ():
        lane.pass_run(
            sum(net_out_ms(costs, run, cost) for cost in _treatments_of(run, assignment)), run is costs.runs[-1]
        )
    return lane.exposed_ms


def _treatments_of(run: Run, assignment: Assignment) -> Sequence[TreatmentCost]:
    """Those of an assignment that treat the blocks of a run."""
    found, first = [], 0
    for cost in assignment[run.stack]:
        if run.first <= first < run.first + run.depth:
            found.append(cost)
        first += cost.blocks
    return found
