"""What of a model is intercepted, and what happens with each part: from a schedule to units."""

import inspect
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, IN_SEGMENTS, KEPT, MOVES, SAVED, Schedule, StackSchedule
from lowtide.runtime.ledger import BlockRecord, Ledger
from lowtide.runtime.resolve import ResolvedStack

NO_FEED_FORWARD = "no feed-forward"
"""Why a block is kept whose feed-forward the schedule recomputes."""
NO_ATTENTION = "no softmax attention"
"""Why a block is kept as it is whose attention would wait in CPU memory."""
MOVED = "moved"
"""Treatment of a module inside a block that is not recomputed: what it saves waits in CPU memory."""
WAKES = "wakes"
"""Treatment of one in the block that runs last: what it saves stays, and reading it wakes the store."""


@dataclass
class Unit:
    """One intercepted module: a block of a stack, or a module of a block's feed-forward or attention side.

    group: which open segment it may join. number: the planned segment within the group. position: its place in the
    group, ascending. width: how many units the planned segment has. last: the
    last position of the group. carry: places and names of the arguments that
    decide whether a segment goes on. counts: whether its replays are the block's recompute_calls.
    moves: what of the block waits in CPU memory, see plan.schedule.MOVES. wakes: what of a block that runs last tells
    the store to begin, as backward reads it: BOUNDARY, ATTENTION, SAVED or nothing. settles: it is what runs last.
    """

    module: weakref.ref[nn.Module]
    record: BlockRecord
    treatment: str
    group: Hashable
    number: int = 0
    position: int = 0
    width: int = 1
    carry: tuple[tuple[int, str], ...] = ()
    last: int = 0
    counts: bool = True
    moves: frozenset[str] = frozenset()
    wakes: str = ""
    settles: bool = False

    def carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found = [args[place] if place < len(args) else kwargs.get(name) for place, name in self.carry]
        return [value for value in found if isinstance(value, torch.Tensor)]


def units_of(
    stacks: Sequence[ResolvedStack], schedule: Schedule, ledger: Ledger, scope: str | None
) -> Iterator[tuple[str, nn.Module, Unit]]:
    """Path, module and unit of all that is intercepted; enters every block in the ledger.

    scope: the treatment that the controls ask for, to say where a block has no such side.
    """
    for stack in stacks:
        plan = schedule.stacks[stack.name]
        ends = plan.last_together if stack is stacks[-1] and schedule.moves_anything else ()  # else nothing is to wake
        for index, (name, block) in enumerate(stack.blocks):
            treatment = plan.treatments[index]
            chains = stack.chains(block) if treatment == FFN else []
            bare = FFN in (treatment, scope) and not stack.chains(block)
            reason = NO_FEED_FORWARD if bare else None
            record = ledger.add(name, stack.name, index, KEPT if bare else treatment, reason)
            unit = _block_unit(block, record, stack, plan, index)
            if index in ends:
                unit.wakes = _waking(stack, block, treatment, schedule.reaches_in)
            unit.settles = stack is stacks[-1] and index == plan.depth - 1
            yield name, block, unit
            for number, chain in enumerate(chains):
                yield from _chain_units(name, record, number, chain, unit)
            if unit.treatment == KEPT and ATTENTION in {*unit.moves, unit.wakes} and SAVED not in unit.moves:
                side = MOVED if ATTENTION in unit.moves else WAKES
                for path, module in stack.attention_sides(block):
                    yield f"{name}.{path}", module, Unit(weakref.ref(module), record, side, (block, path))


def moving(stack: ResolvedStack, plan: StackSchedule, index: int) -> frozenset[str]:
    """What of this block waits in CPU memory, of what the plan has wait there."""
    return plan.moves[index] & movable(stack, stack.blocks[index][1], plan.treatments[index])


def lacks_attention(stack: ResolvedStack, plan: StackSchedule, index: int) -> bool:
    """Whether nothing of this block waits in CPU memory, since its attention is what is to wait and it has none."""
    without = ATTENTION in plan.moves[index] and not stack.attention_sides(stack.blocks[index][1])
    return without and not moving(stack, plan, index)


def movable(stack: ResolvedStack, block: nn.Module, treatment: str) -> frozenset[str]:
    """What of this block can wait in CPU memory, of ``plan.schedule.MOVES``."""
    if treatment == FFN and not stack.chains(block):
        treatment = KEPT
    return MOVES[treatment] if stack.attention_sides(block) else MOVES[treatment] - {ATTENTION}


def _waking(stack: ResolvedStack, block: nn.Module, treatment: str, reaches_in: bool) -> str:
    """What of the block that runs last tells, as backward reads it, that the rest is wanted soon. At its attention more
    of its own memory is free again than at its end; but where no other block is reached into, it is not either, since
    blocks may be compiled."""
    if treatment in IN_SEGMENTS:
        return BOUNDARY
    attends = bool(stack.attention_sides(block)) and block._compiled_call_impl is None
    return ATTENTION if reaches_in and attends else SAVED


def _chain_units(
    block: str, record: BlockRecord, number: int, chain: list[tuple[str, nn.Module]], of_block: Unit
) -> Iterator[tuple[str, nn.Module, Unit]]:
    for place, (path, module) in enumerate(chain):
        counts = number == place == 0  # both streams of a block are one recomputation of its feed-forward side
        unit = Unit(weakref.ref(module), record, FFN, (block, number), position=place, counts=counts)
        unit.width, unit.last = len(chain), len(chain) - 1
        unit.moves = of_block.moves
        yield f"{block}.{path}", module, unit


def _block_unit(block: nn.Module, record: BlockRecord, stack: ResolvedStack, plan: StackSchedule, index: int) -> Unit:
    number, moves = plan.segments[index], plan.moves[index]
    if number is None:
        return Unit(weakref.ref(block), record, KEPT, stack.name, moves=moves)
    width = len(plan.blocks_of(number))
    carry = _carry_places(block, stack.row.carry)
    treatment = plan.treatments[index]
    return Unit(weakref.ref(block), record, treatment, stack.name, number, index, width, carry, moves=moves)


def _carry_places(block: nn.Module, names: Sequence[str]) -> tuple[tuple[int, str], ...]:
    if not names:
        return ()
    parameters = list(inspect.signature(block.forward).parameters)
    return tuple((parameters.index(name), name) for name in names if name in parameters)
