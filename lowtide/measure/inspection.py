"""What a setting would do with every block of a model: no step is run, and no weights are needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide import families
from lowtide.controls import CheckpointConfig, scopes_of
from lowtide.families import Family
from lowtide.handle import schedule_for, without_last_round_trip
from lowtide.measure.build import Target, build_model
from lowtide.plan.schedule import ATTENTION, FFN, KEPT, MOVES, StackSchedule
from lowtide.runtime.resolve import ResolvedStack, resolve


@dataclass(frozen=True)
class PlannedBlock:
    """Treatment of one block, with ``+offload`` where something of it waits in CPU memory.

    segment: blocks of a stack with one number are recomputed as one. moves: what waits in CPU memory, of
    ``plan.schedule.MOVES``.
    """

    name: str
    index: int
    treatment: str
    segment: int | None
    reason: str | None
    moves: tuple[str, ...] = ()


@dataclass(frozen=True)
class InspectedStack:
    """One stack. found: by structure, not declared by a family. feed_forward, attention: submodules of a block."""

    name: str
    depth: int
    found: bool
    block_classes: tuple[str, ...]
    feed_forward: tuple[str, ...]
    attention: tuple[str, ...]
    blocks: tuple[PlannedBlock, ...]


@dataclass(frozen=True)
class Inspection:
    """A model, its stacks, and what the settings (arguments of ``lowtide.attach``) do with each block.

    family: key, or None for a model that no family describes. scopes: the backends that it can run.
    """

    model: str
    class_name: str
    family: str | None
    parameters: int
    stacks: tuple[InspectedStack, ...]
    scopes: tuple[str, ...]
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "class": self.class_name,
            "family": self.family,
            "parameters": self.parameters,
            "stacks": [_stack_as_dict(stack) for stack in self.stacks],
            "scopes": list(self.scopes),
            "settings": self.settings,
        }


def inspect_target(target: Target, config: CheckpointConfig) -> Inspection:
    """What ``config`` would do with the target's model, which may be on the meta device.

    Raises UnsupportedError where the model has no block stacks, or cannot run the scope.
    """
    stacks = resolve(target.model, target.family.stacks if target.family else None)
    schedule = without_last_round_trip(schedule_for(stacks, config), [stack.name for stack in stacks])
    return Inspection(
        model=target.label,
        class_name=class_of(target.model),
        family=target.family.key if target.family else None,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        stacks=tuple(_inspected(stack, schedule.stacks[stack.name], config.scope) for stack in stacks),
        scopes=tuple(_scopes(stacks)),
        settings=config.attach_arguments(),
    )


def describe_families() -> list[dict[str, Any]]:
    """Every family, with the depths of its real configuration: built on the meta device, so nothing can drift."""
    return [_family_as_dict(family) for family in families.all_families()]


def class_of(model: nn.Module) -> str:
    """A model's class with its library: ``diffusers.FluxTransformer2DModel``."""
    return f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}"


def _family_as_dict(family: Family) -> dict[str, Any]:
    stacks = resolve(build_model(family, "real", device="meta"), family.stacks)
    return {
        "key": family.key,
        "title": family.title,
        "class": family.class_path,
        "aliases": list(family.aliases),
        "stacks": [
            {
                "path": stack.name,
                "blocks": list(stack.row.blocks),
                "depth": len(stack.blocks),
                "ffn": list(_feed_forward_names(stack)),
                "attention": list(stack.row.attention),
            }
            for stack in stacks
        ],
        "scopes": _scopes(stacks),
        "parameters": family.parameters,
    }


def _scopes(stacks: Sequence[ResolvedStack]) -> list[str]:
    return scopes_of((stack.has_feed_forward for stack in stacks), (stack.has_attention for stack in stacks))


def _inspected(stack: ResolvedStack, schedule: StackSchedule, scope: str | None) -> InspectedStack:
    return InspectedStack(
        name=stack.name,
        depth=len(stack.blocks),
        found=stack.found,
        block_classes=tuple(dict.fromkeys(type(block).__name__ for _, block in stack.blocks)),
        feed_forward=_feed_forward_names(stack),
        attention=stack.row.attention,
        blocks=tuple(_planned(stack, schedule, scope)),
    )


def _planned(stack: ResolvedStack, schedule: StackSchedule, scope: str | None) -> Iterator[PlannedBlock]:
    for index, (name, block) in enumerate(stack.blocks):
        bare = scope == FFN and not stack.chains(block)
        treatment = KEPT if bare else schedule.treatments[index]
        possible = MOVES[treatment] if stack.attention_sides(block) else MOVES[treatment] - {ATTENTION}
        moves = tuple(sorted(schedule.moves[index] & possible))
        offload = "+offload" if moves else ""
        reason = "no feed-forward" if bare else None
        yield PlannedBlock(name, index, treatment + offload, schedule.segments[index], reason, moves)


def _feed_forward_names(stack: ResolvedStack) -> tuple[str, ...]:
    chains: Sequence[str] = [path for _, block in stack.blocks for chain in stack.chains(block) for path, _ in chain]
    return tuple(dict.fromkeys(chains))


def _stack_as_dict(stack: InspectedStack) -> dict[str, Any]:
    return {
        "name": stack.name,
        "depth": stack.depth,
        "found": stack.found,
        "block_classes": list(stack.block_classes),
        "feed_forward": list(stack.feed_forward),
        "attention": list(stack.attention),
        "blocks": [dict(vars(block)) for block in stack.blocks],
    }
