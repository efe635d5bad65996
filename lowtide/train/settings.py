"""For one model and batch: what each setting keeps in memory and recomputes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide import families
from lowtide.controls import CheckpointConfig
from lowtide.handle import schedule_for
from lowtide.measure.held import trace_held
from lowtide.plan.held import HeldTrace, predict
from lowtide.plan.schedule import KEPT, Schedule
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.train.families.base import Denoiser
from lowtide.train.flow import Batch, Noised

OFFERED: tuple[Mapping[str, Any], ...] = (
    {"gradient_checkpointing": False},
    {"gradient_checkpointing_backend": "torch-ffn"},
    {"gradient_checkpointing_backend": "torch"},
    {"gradient_checkpointing_backend": "torch", "gradient_checkpointing_interval": 2},
    {
        "gradient_checkpointing_backend": "torch",
        "gradient_checkpointing_interval": 2,
        "gradient_checkpointing_segment_stride": 4,
    },
)


def compare_settings(
    denoiser: Denoiser, family: str, noised: Noised, batch: Batch, ran: CheckpointConfig
) -> list[dict[str, Any]]:
    """One entry a setting, in the order of the decision rule; the one that ran is among them.

    The model must be detached. One forward runs, without checkpointing, so that it needs the memory of a plain one.
    Entries: keys (flat), scope, held_bytes (kept between forward and backward), most_bytes (those and the largest piece
    that is recomputed at once: the peak of backward is at most that), recomputed (blocks, whole or in part), blocks,
    ran.
    """
    stacks = resolve(denoiser.model, families.find(family).stacks)
    trace = trace_held(denoiser.model, stacks, denoiser.arguments(noised.latents, noised.sigmas, batch.text))
    offered = [CheckpointConfig(**keys) for keys in OFFERED]
    if ran not in offered:
        offered.append(ran)
    return [_entry(config, stacks, trace, config == ran) for config in offered]


def _entry(config: CheckpointConfig, stacks: list[ResolvedStack], trace: HeldTrace, ran: bool) -> dict[str, Any]:
    schedule = schedule_for(stacks, config)
    held = predict(trace, schedule)
    return {
        "keys": short_keys(config),
        "scope": config.scope,
        "held_bytes": held.held_bytes,
        "most_bytes": held.held_bytes + max((_piece_bytes(trace, names) for names in held.segments), default=0),
        "recomputed": len(recomputed_blocks(stacks, schedule)),
        "blocks": sum(len(stack.blocks) for stack in stacks),
        "ran": ran,
    }


def _piece_bytes(trace: HeldTrace, names: Sequence[str]) -> int:
    """What the calls of one segment save, when all are run again."""
    calls = [call for block in trace.calls for call in (block, *block.inner)]
    return trace.bytes_of(storage for call in calls if call.name in names for storage in call.all_saved)


def short_keys(config: CheckpointConfig) -> dict[str, Any]:
    """The flat keys that make this setting, those that only repeat a default left out."""
    if not config.gradient_checkpointing:
        return {"gradient_checkpointing": False}
    flat = config.as_flat_dict()
    return {key: value for key, value in flat.items() if value is not None and key != "gradient_checkpointing"}


def recomputed_blocks(stacks: Sequence[ResolvedStack], schedule: Schedule) -> list[str]:
    """Names of the blocks that a schedule recomputes, whole or in part."""
    return [
        name
        for stack in stacks
        for (name, _), treatment in zip(stack.blocks, schedule.stacks[stack.name].treatments, strict=True)
        if treatment != KEPT
    ]
