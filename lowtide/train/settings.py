"""For one model and batch: what each setting keeps in memory and recomputes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide import families
from lowtide.controls import CheckpointConfig
from lowtide.handle import schedule_for, without_last_round_trip
from lowtide.measure.held import trace_held
from lowtide.plan.held import Held, HeldTrace, predict
from lowtide.plan.schedule import KEPT, Schedule
from lowtide.runtime.link import can_offload
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.train.families.base import Denoiser
from lowtide.train.flow import Batch, Noised

OFFERED: tuple[Mapping[str, Any], ...] = (
    {"gradient_checkpointing": False},
    {"gradient_checkpointing_backend": "torch-ffn"},
    {"gradient_checkpointing_backend": "torch"},
    {"gradient_checkpointing_backend": "unsloth-ffn"},
    {"gradient_checkpointing_backend": "unsloth-ffn", "gradient_checkpointing_offload_attention": True},
    {"gradient_checkpointing_backend": "unsloth"},
    {"gradient_checkpointing_backend": "torch", "gradient_checkpointing_interval": 2},
    {
        "gradient_checkpointing_backend": "torch",
        "gradient_checkpointing_interval": 2,
        "gradient_checkpointing_segment_stride": 4,
    },
)

_BACKEND = "gradient_checkpointing_backend"


def compare_settings(
    denoiser: Denoiser, family: str, noised: Noised, batch: Batch, ran: CheckpointConfig, schedule: Schedule
) -> list[dict[str, Any]]:
    """One entry a setting, in the order of the decision rule; the one that ran is among them.

    schedule: of the setting that ran. Settings that offload are among them where they could run. The model must be
    detached. One forward runs, without checkpointing, so that it needs the memory of a plain one.
    Entries: keys (flat), scope, held_bytes (kept on the device between forward and backward), cpu_bytes (kept in CPU
    memory), most_bytes (held_bytes and the largest piece that is recomputed at once: the peak of backward is at most
    that, plus what comes back from CPU memory ahead), recomputed (blocks, whole or in part), blocks, ran.
    """
    stacks = resolve(denoiser.model, families.find(family).stacks)
    trace = trace_held(denoiser.model, stacks, denoiser.arguments(noised.latents, noised.sigmas, batch.text))
    moves = can_offload(next(denoiser.model.parameters()).device)
    offered = [config for config in _offered(ran) if moves or not config.moves]
    if ran not in offered:
        offered.append(ran)
    return [_entry(config, stacks, trace, schedule if config == ran else None) for config in offered]


def _offered(ran: CheckpointConfig) -> list[CheckpointConfig]:
    """With the pool and the smallest size of the setting that ran, so that rows differ in what they say."""
    alike = {"offload_min_bytes": ran.offload_min_bytes}
    alike["offload_pin_memory_max_buckets"] = ran.offload_pin_memory_max_buckets
    return [CheckpointConfig(**keys, **alike) for keys in OFFERED]


def _entry(
    config: CheckpointConfig, stacks: list[ResolvedStack], trace: HeldTrace, ran: Schedule | None
) -> dict[str, Any]:
    schedule = ran or _schedule(config, stacks)
    held = predict(trace, schedule, config.offload_min_bytes)
    return {
        "keys": short_keys(config),
        "scope": _scope(config),
        "held_bytes": held.held_bytes,
        "cpu_bytes": held.cpu_bytes,
        "most_bytes": _most_bytes(trace, held),
        "recomputed": len(recomputed_blocks(stacks, schedule)),
        "blocks": sum(len(stack.blocks) for stack in stacks),
        "ran": ran is not None,
    }


def _scope(config: CheckpointConfig) -> str | None:
    if config.is_auto:
        return config.backend
    return "plan" if config.schedule is not None else config.scope


def most_bytes(config: CheckpointConfig, stacks: list[ResolvedStack], trace: HeldTrace) -> int:
    """What a setting holds between forward and backward, and the largest piece that it recomputes at once."""
    return most_bytes_under(_schedule(config, stacks), trace, config.offload_min_bytes)


def most_bytes_under(schedule: Schedule, trace: HeldTrace, min_bytes: int) -> int:
    """The same of a schedule."""
    return _most_bytes(trace, predict(trace, schedule, min_bytes))


def _most_bytes(trace: HeldTrace, held: Held) -> int:
    return held.held_bytes + max(map(trace.piece_bytes, held.segments), default=0)


def _schedule(config: CheckpointConfig, stacks: list[ResolvedStack]) -> Schedule:
    return without_last_round_trip(schedule_for(stacks, config), [stack.name for stack in stacks])


def short_keys(config: CheckpointConfig) -> dict[str, Any]:
    """The flat keys that make this setting, those that only repeat a default left out."""
    flat, usual = config.as_flat_dict(), CheckpointConfig().as_flat_dict()
    backend = {_BACKEND: flat.pop(_BACKEND)} if config.gradient_checkpointing else {}
    changed = {key: value for key, value in flat.items() if value != usual[key]}
    return {**backend, **{key: value for key, value in changed.items() if key != _BACKEND}}


def recomputed_blocks(stacks: Sequence[ResolvedStack], schedule: Schedule) -> list[str]:
    """Names of the blocks that a schedule recomputes, whole or in part."""
    return [
        name
        for stack in stacks
        for (name, _), treatment in zip(stack.blocks, schedule.stacks[stack.name].treatments, strict=True)
        if treatment != KEPT
    ]
