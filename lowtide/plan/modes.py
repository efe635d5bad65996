"""The fixed settings that a plan is always compared with: what the controls can ask for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.plan.assignment import Assignment, without_last_move
from lowtide.plan.costs import BlockKind, StepCosts, TreatmentCost
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SELECTIVE, WHOLE


@dataclass(frozen=True)
class Mode:
    """moves: what of the treated blocks waits in CPU memory. between: what of the blocks between segments does."""

    treatment: str
    moves: frozenset[str] = frozenset()
    interval: int = 1
    stride: int = 1
    between: frozenset[str] = frozenset()


PLAIN = "no checkpointing"
_BOUNDARY, _ATTENTION, _BOTH = frozenset({BOUNDARY}), frozenset({ATTENTION}), frozenset({BOUNDARY, ATTENTION})
MODES: Mapping[str, Mode] = {
    PLAIN: Mode(KEPT),
    "torch-ffn": Mode(FFN),
    "torch": Mode(WHOLE),
    "torch-selective": Mode(SELECTIVE),
    "unsloth-ffn": Mode(FFN, _BOUNDARY),
    "unsloth": Mode(WHOLE, _BOUNDARY),
    "unsloth-selective": Mode(SELECTIVE, _BOTH),
    "offload_attention": Mode(KEPT, _ATTENTION),
    "torch-ffn, offload_attention": Mode(FFN, _ATTENTION, between=_ATTENTION),
    "unsloth-ffn, offload_attention": Mode(FFN, _BOTH, between=_ATTENTION),
    "torch, interval 2": Mode(WHOLE, interval=2, stride=2),
    "torch, interval 2, stride 4": Mode(WHOLE, interval=2, stride=4),
    "torch, interval 2, stride 4, offload_attention": Mode(WHOLE, interval=2, stride=4, between=_ATTENTION),
    "unsloth, interval 2": Mode(WHOLE, _BOUNDARY, interval=2, stride=2),
    "unsloth, interval 2, stride 4": Mode(WHOLE, _BOUNDARY, interval=2, stride=4),
}
"""The simplest first."""


def assignments(costs: StepCosts) -> Iterator[tuple[str, Assignment]]:
    """Every mode that the model can run and whose costs are known, by name."""
    for name, mode in MODES.items():
        if costs.link is None and (mode.moves or mode.between):
            continue
        try:
            found = without_last_move(
                costs, {stack: _stack(costs, kinds, mode) for stack, kinds in costs.stacks.items()}
            )
        except ConfigError:  # a way to treat a block whose costs nobody knows
            continue
        if _is_in_force(mode, [cost for chosen in found.values() for cost in chosen]):
            yield name, found


def _is_in_force(mode: Mode, chosen: Sequence[TreatmentCost]) -> bool:
    """Whether the model has what the mode treats and moves; where only the last block has, nothing moves."""
    moved = frozenset().union(*(cost.moves for cost in chosen))
    treated = mode.treatment == KEPT or any(cost.treatment == mode.treatment for cost in chosen)
    return treated and mode.moves | mode.between <= moved


def _stack(costs: StepCosts, kinds: Sequence[str], mode: Mode) -> tuple[TreatmentCost, ...]:
    chosen, index = [], 0
    while index < len(kinds):
        place = index % mode.stride
        width = min(mode.interval - place, len(kinds) - index) if place < mode.interval else 0
        if len(set(kinds[index : index + width])) > 1:
            raise ConfigError("no costs are known for segments of unlike blocks")
        kind = costs.kinds[kinds[index]]
        chosen.append(_treated(kind, mode, width) if width else _way(kind, KEPT, mode.between, 1))
        index += chosen[-1].blocks
    return tuple(chosen)


def _treated(kind: BlockKind, mode: Mode, blocks: int) -> TreatmentCost:
    if mode.treatment == FFN and not any(cost.treatment == FFN for cost in kind.treatments):
        return _way(kind, KEPT, mode.between, 1)  # no feed-forward
    return _way(kind, mode.treatment, mode.moves, blocks)


def _way(kind: BlockKind, treatment: str, moves: frozenset[str], blocks: int) -> TreatmentCost:
    """Of attention, a block moves only what it has."""
    if not any(ATTENTION in cost.moves for cost in kind.treatments):
        moves -= {ATTENTION}
    cost = kind.by_way.get((treatment, moves, blocks))
    if cost is None:
        raise ConfigError(f"no costs are known for {treatment} on {blocks} blocks")
    return cost
