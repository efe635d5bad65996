"""Casts of trained weights that autocast keeps until the forward is over, also of what is recomputed later."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from lowtide.measure.residents import BFLOAT16_BYTES
from lowtide.plan.costs import StepCosts, TreatmentCost
from lowtide.plan.schedule import ATTENTION, FFN, KEPT, SAVED
from lowtide.runtime.resolve import ResolvedStack

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def with_casts(costs: StepCosts, stacks: Sequence[ResolvedStack]) -> StepCosts:
    """With those that a treatment does not keep anyway, counted as kept: they are there when the forward ends, which is
    where backward begins. After that they are gone, so that later positions are bounded from above.

    costs: of a forward that was traced under autocast, where blocks that are kept hold their casts.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for stack in stacks:
        for (_, block), kind in zip(stack.blocks, costs.stacks[stack.name], strict=True):
            feed_forward = {id(part) for chain in stack.chains(block) for _, side in chain for part in side.modules()}
            whole, side = sum(_casts(block)), sum(_casts(block, feed_forward))
            before = sizes.get(kind, (0, 0))
            sizes[kind] = max(before[0], whole), max(before[1], side)
    kinds = {
        name: replace(kind, treatments=tuple(_with(cost, *sizes[name]) for cost in kind.treatments))
        for name, kind in costs.kinds.items()
    }
    return replace(costs, kinds=kinds)


def _with(cost: TreatmentCost, whole_bytes: int, feed_forward_bytes: int) -> TreatmentCost:
    """Of the attention side nothing is kept where it moves, nor where all is recomputed."""
    keeps_attention = cost.treatment in (KEPT, FFN) and not cost.moves & {ATTENTION, SAVED}
    keeps_feed_forward = cost.treatment == KEPT and SAVED not in cost.moves
    beside = (0 if keeps_attention else whole_bytes - feed_forward_bytes) + (
        0 if keeps_feed_forward else feed_forward_bytes
    )
    return replace(cost, kept_bytes=cost.kept_bytes + cost.blocks * beside)


def _casts(block: nn.Module, within: set[int] | None = None) -> Iterator[int]:
    """Bytes of each. within: of these modules alone."""
    for module in block.modules():
        if isinstance(module, _CAST) and (within is None or id(module) in within):
            yield from (BFLOAT16_BYTES * weight.numel() for weight in module.parameters(False) if weight.requires_grad)
