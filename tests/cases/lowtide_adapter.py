"""lowtide behind the interface of the bug cases (see _common.py).

Without an accelerator everything runs inside ``cpu_offload``, so that offload really moves what the cases save; their
tensors are small, so no tensor counts as too small.
"""

import json
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import lowtide
from lowtide import controls, testing
from lowtide.handle import without_last_round_trip
from lowtide.plan.schedule import BOUNDARY, KEPT, Schedule, whole_blocks
from lowtide.runtime.audit import audit
from lowtide.runtime.host_memory import HostMemory
from lowtide.runtime.pool import Pool, size_class
from lowtide.runtime.store import alive

__all__ = [
    "audit",
    "checkpoint",
    "describe",
    "disable",
    "dump",
    "enable",
    "inert",
    "live_restored",
    "offload",
    "offloaded",
    "parse",
    "parse_switch",
    "pool_bytes",
    "pool_reset",
    "pool_takes",
    "pool_under",
    "schedule",
    "stats",
]

_handles: WeakKeyDictionary[nn.Module, lowtide.Handle] = WeakKeyDictionary()
_on_the_cpu = testing.cpu_offload()
if not torch.accelerator.is_available():
    _on_the_cpu.__enter__()

pool_bytes = testing.pool_bytes
pool_reset = testing.release_pool


def checkpoint(function: Any, *args: Any, **options: Any) -> Any:
    return lowtide.checkpoint(function, *args, offload_min_bytes=0, **options)


def offload() -> Any:
    return lowtide.offload_activations(offload_min_bytes=0)


def enable(model: nn.Module, backend: str | None = "torch", interval: int | None = None, **options: Any) -> None:
    if backend is None and not options:
        raise ValueError("enable() without a backend would enable nothing")
    _handles[model] = lowtide.attach(model, backend=backend, interval=interval, offload_min_bytes=0, **options)


def disable(model: nn.Module) -> None:
    _handles.pop(model).detach()


def stats() -> dict[str, Any]:
    """Totals of the last step of the model that was enabled last."""
    return list(_handles.values())[-1].receipt().totals


def describe(model: nn.Module) -> dict[str, str]:
    """How many blocks of each stack are treated."""
    stacks = _handles[model].schedule.stacks
    return {name: f"{plan.depth - plan.count(KEPT)} of {plan.depth} treated" for name, plan in stacks.items()}


def parse(keys: dict[str, Any]) -> dict[str, Any]:
    return lowtide.CheckpointConfig(**keys).as_flat_dict()


def dump(keys: dict[str, Any]) -> dict[str, Any]:
    """Through a file's text and back."""
    return json.loads(json.dumps(keys))


def parse_switch(value: Any) -> bool | str | None:
    return controls.parse_switch(value, controls.BACKENDS)


def schedule(depth: int, interval: int, stride: int | None = None) -> list[int]:
    treatments = whole_blocks(depth, interval, stride).treatments
    return [index for index, treatment in enumerate(treatments) if treatment != KEPT]


def offloaded(depth: int, interval: int) -> list[int]:
    plan = Schedule({"blocks": whole_blocks(depth, interval).moving({BOUNDARY})})
    return [i for i, moves in enumerate(without_last_round_trip(plan, ["blocks"]).stacks["blocks"].moves) if moves]


def inert(model: nn.Module) -> list[str]:
    return [note.subject for note in _handles[model].receipt().inert]


def live_restored() -> int:
    entries = [reference() for store in alive for reference in store._entries.values()]
    return sum(
        entry.size
        for entry in entries
        if entry is not None and (entry.target is not None or any(view() is not None for view in entry.views))
    )


pool_takes = size_class


def pool_under(limit_bytes: int, sizes: list[int]) -> tuple[int, int, list[str]]:
    """Pinning always works here; what bounds it is the machine's memory."""
    pool = Pool(12, lambda size: torch.empty(size, dtype=torch.uint8), lambda: HostMemory(limit_bytes, limit_bytes))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        taken = [pool.take(size) for size in sizes]
    statistics = pool.statistics()
    assert len(taken) == len(sizes)
    return statistics["pinned_bytes"], statistics["pageable_bytes"], [str(warning.message) for warning in told]
