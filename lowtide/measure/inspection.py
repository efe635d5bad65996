"""What a setting would do with every block of a model: no step is run, and no weights are needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.controls import CheckpointConfig, scopes_of
from lowtide.errors import ConfigError
from lowtide.handle import (
    RUNS_LAST,
    check_schedule,
    depths_of,
    held_back,
    schedule_for,
    without_last_round_trip,
)
from lowtide.inert import attention_offload, ignored, untreated
from lowtide.measure.build import Target
from lowtide.measure.watch import Missed, StackEvidence, Watched, watch, without_forward
from lowtide.plan.schedule import FFN, KEPT, Schedule, StackSchedule
from lowtide.runtime.receipt import Note
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.runtime.unit import NO_ATTENTION, NO_FEED_FORWARD, lacks_attention, moving


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
    """One stack.

    found: by structure, not declared by a family; evidence: how sure that is. feed_forward, attention: submodules of a
    block.
    """

    name: str
    depth: int
    found: bool
    block_classes: tuple[str, ...]
    feed_forward: tuple[str, ...]
    attention: tuple[str, ...]
    blocks: tuple[PlannedBlock, ...]
    evidence: StackEvidence


@dataclass(frozen=True)
class Inspection:
    """A model, its stacks, and what the settings (arguments of ``lowtide.attach``) do with each block.

    settings: None where a schedule took their place. family: key, or None for a model that no family describes. scopes:
    the backends that it can run. missed: blocks that a forward showed and structure did not. inert: what will change
    nothing, and where. ignored: what this model can never honour.
    """

    model: str
    class_name: str
    family: str | None
    parameters: int
    stacks: tuple[InspectedStack, ...]
    scopes: tuple[str, ...]
    settings: dict[str, Any] | None
    missed: tuple[Missed, ...] = ()
    inert: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "class": self.class_name,
            "family": self.family,
            "parameters": self.parameters,
            "stacks": [_stack_as_dict(stack) for stack in self.stacks],
            "scopes": list(self.scopes),
            "settings": self.settings,
            "missed": [{"class": missed.block_class, "names": list(missed.names)} for missed in self.missed],
            "inert": [{"option": note.subject, "reason": note.reason} for note in self.inert],
            "ignored": [{"option": note.subject, "reason": note.reason} for note in self.ignored],
        }


def inspect_target(
    target: Target,
    config: CheckpointConfig,
    inputs: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
) -> Inspection:
    """What ``config`` would do with the target's model, which may be on the meta device.

    schedule: instead of what ``config`` says of blocks. inputs: keyword arguments of a forward; where the stacks were
    found by structure, it is run without gradients and compared with them. Raises UnsupportedError where the model has
    no block stacks, or cannot run the scope; ConfigError where the forward fails, or the schedule is another model's.
    """
    stacks = resolve(target.model, target.family.stacks if target.family else None)
    planned = schedule is not None
    if schedule is not None:
        check_schedule(schedule, stacks)
    wanted = schedule_for(stacks, config) if schedule is None else schedule
    runs = without_last_round_trip(wanted, [stack.name for stack in stacks])
    stay = held_back(stacks, wanted, runs)
    watched = _watched(target, stacks, inputs)
    inspected = tuple(
        _inspected(stack, runs.stacks[stack.name], None if planned else config.scope, stay, watched.stacks[stack.name])
        for stack in stacks
    )
    return Inspection(
        model=target.label,
        class_name=class_of(target.model),
        family=target.family.key if target.family else None,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        stacks=inspected,
        scopes=tuple(scopes_of_stacks(stacks)),
        settings=None if planned else config.attach_arguments(),
        missed=watched.missed,
        inert=()
        if planned
        else (
            *untreated(config, [block.treatment for stack in inspected for block in stack.blocks]),
            *attention_offload(config, _treated(stacks, inspected)),
        ),
        ignored=() if planned else tuple(ignored(config, depths_of(stacks, config))),
    )


def class_of(model: nn.Module) -> str:
    """A model's class with its library: ``diffusers.FluxTransformer2DModel``."""
    return f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}"


def scopes_of_stacks(stacks: Sequence[ResolvedStack]) -> list[str]:
    """The backends that a model with these stacks can run."""
    return scopes_of((stack.has_feed_forward for stack in stacks), (stack.has_attention for stack in stacks))


def feed_forward_names(stack: ResolvedStack) -> tuple[str, ...]:
    """Submodules of the feed-forward sides that the blocks really have, by path in a block."""
    chains: Sequence[str] = [path for _, block in stack.blocks for chain in stack.chains(block) for path, _ in chain]
    return tuple(dict.fromkeys(chains))


def _watched(target: Target, stacks: Sequence[ResolvedStack], inputs: Mapping[str, Any] | None) -> Watched:
    if inputs is not None and target.family is not None:
        raise ConfigError(f"the stacks of {target.label} are declared by its family: leave its inputs out")
    if inputs is not None:
        return watch(target.model, stacks, inputs)
    return Watched({stack.name: without_forward(stack) for stack in stacks})


def _treated(stacks: Sequence[ResolvedStack], inspected: Sequence[InspectedStack]) -> list[tuple[str, bool]]:
    """Of every block the treatment, and whether it has softmax attention."""
    return [
        (plan.treatment.removesuffix("+offload"), bool(stack.attention_sides(block)))
        for stack, planned in zip(stacks, inspected, strict=True)
        for (_, block), plan in zip(stack.blocks, planned.blocks, strict=True)
    ]


def _inspected(
    stack: ResolvedStack, schedule: StackSchedule, scope: str | None, stay: set[str], evidence: StackEvidence
) -> InspectedStack:
    return InspectedStack(
        name=stack.name,
        depth=len(stack.blocks),
        found=stack.found,
        block_classes=tuple(dict.fromkeys(type(block).__name__ for _, block in stack.blocks)),
        feed_forward=feed_forward_names(stack),
        attention=stack.row.attention,
        blocks=tuple(_planned(stack, schedule, scope, stay)),
        evidence=evidence,
    )


def _planned(
    stack: ResolvedStack, schedule: StackSchedule, scope: str | None, stay: set[str]
) -> Iterator[PlannedBlock]:
    for index, (name, block) in enumerate(stack.blocks):
        bare = (scope or schedule.treatments[index]) == FFN and not stack.chains(block)
        treatment = KEPT if bare else schedule.treatments[index]
        moves = tuple(sorted(moving(stack, schedule, index)))
        offload = "+offload" if moves else ""
        without = treatment == KEPT and lacks_attention(stack, schedule, index)
        reason = NO_FEED_FORWARD if bare else RUNS_LAST if name in stay else NO_ATTENTION if without else None
        yield PlannedBlock(name, index, treatment + offload, schedule.segments[index], reason, moves)


def _stack_as_dict(stack: InspectedStack) -> dict[str, Any]:
    return {
        "name": stack.name,
        "depth": stack.depth,
        "found": stack.found,
        "block_classes": list(stack.block_classes),
        "feed_forward": list(stack.feed_forward),
        "attention": list(stack.attention),
        "certainty": stack.evidence.stack.certainty,
        "why": list(stack.evidence.stack.why),
        "sides": {
            path: {"certainty": side.certainty, "why": list(side.why)} for path, side in stack.evidence.sides.items()
        },
        "blocks": [dict(vars(block)) for block in stack.blocks],
    }
