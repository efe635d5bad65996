"""Which costs a schedule stands for, and the schedule that chosen costs make. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence

from lowtide.errors import ConfigError
from lowtide.plan.costs import BlockKind, StepCosts, TreatmentCost
from lowtide.plan.schedule import IN_SEGMENTS, Schedule, StackSchedule, word_of

Assignment = Mapping[str, tuple[TreatmentCost, ...]]
"""The treatments of each stack's blocks in call order; one of several blocks stands once."""


def schedule_of(assignment: Assignment) -> Schedule:
    """The schedule, with the bytes in flight that ``predict_step`` counts on."""
    stacks = {name: _stack_of(chosen) for name, chosen in assignment.items()}
    bound = in_flight_bytes(assignment) or None
    return Schedule(stacks, in_flight_bytes=bound, prefetch_bytes=bound)


def in_flight_bytes(assignment: Assignment) -> int:
    """Bytes that may be in flight, each way: enough for the treatment that copies most."""
    return in_flight_bytes_for(max((cost.copied_bytes for chosen in assignment.values() for cost in chosen), default=0))


def in_flight_bytes_for(copied_bytes: int) -> int:
    """Rounded up by at most an eighth, so that there are few of them to choose from."""
    step = 1 << max(0, copied_bytes.bit_length() - 4)
    return -(-copied_bytes // step) * step


def _stack_of(chosen: Sequence[TreatmentCost]) -> StackSchedule:
    blocks = [(number, cost) for number, cost in enumerate(chosen) for _ in range(cost.blocks)]
    return StackSchedule(
        tuple(cost.treatment for _, cost in blocks),
        tuple(number if cost.treatment in IN_SEGMENTS else None for number, cost in blocks),
        tuple(cost.moves for _, cost in blocks),
    )


def assignment_of(costs: StepCosts, schedule: Schedule) -> Assignment:
    """The costs of a schedule as ``attach`` runs it: what is treated last moves nothing.

    Raises ConfigError where the schedule is for other stacks, or treats a block in a way whose costs are not known.
    """
    depths = {name: stack.depth for name, stack in schedule.stacks.items()}
    known = {name: len(kinds) for name, kinds in costs.stacks.items()}
    if depths != known:
        raise ConfigError(f"the schedule is for stacks {depths}, but the costs are for {known}")
    found = {name: tuple(_costs_of(costs, name, schedule.stacks[name])) for name in costs.stacks}
    return without_last_move(costs, found)


def _costs_of(costs: StepCosts, name: str, stack: StackSchedule) -> Iterator[TreatmentCost]:
    kinds, index = costs.stacks[name], 0
    while index < stack.depth:
        segment = stack.segments[index]
        blocks = 1 if segment is None else len(stack.blocks_of(segment))
        treatment, moves = stack.treatments[index], stack.moves[index]
        cost = costs.kinds[kinds[index]].by_way.get((treatment, moves, blocks))
        if cost is None or len(set(kinds[index : index + blocks])) > 1:
            word = word_of(treatment, moves)
            raise ConfigError(f"no costs are known for {word} on {blocks} blocks from block {index} of stack {name!r}")
        yield cost
        index += blocks


def placed(costs: StepCosts, assignment: Assignment) -> Iterator[tuple[str, int, str, TreatmentCost]]:
    """Stack, index of its first block, and kind, of everything that is assigned, in call order."""
    for stack, kinds in costs.stacks.items():
        index = 0
        for cost in assignment[stack]:
            yield stack, index, kinds[index], cost
            index += cost.blocks


def without_last_move(costs: StepCosts, assignment: Assignment) -> Assignment:
    """The same, but what runs last stays on the device: backward asks for it at once.

    Raises ConfigError where no costs are known for that.
    """
    run = costs.runs[-1]
    *others, last = assignment[run.stack]
    staying = staying_like(costs.kinds[run.kind], last)
    if staying is None:
        raise ConfigError(f"no costs are known for {last.treatment} on {last.blocks} blocks")
    return {**assignment, run.stack: (*others, staying)}


def staying_like(kind: BlockKind, cost: TreatmentCost) -> TreatmentCost | None:
    """The same treatment with nothing moving."""
    return kind.by_way.get((cost.treatment, frozenset(), cost.blocks))
