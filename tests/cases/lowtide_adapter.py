"""lowtide behind the interface of the bug cases (see _common.py)."""

import json
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

import lowtide
from lowtide import controls
from lowtide.plan.schedule import KEPT, whole_blocks
from lowtide.runtime.audit import audit

__all__ = ["audit", "checkpoint", "describe", "disable", "dump", "enable", "parse", "parse_switch", "schedule", "stats"]

checkpoint = lowtide.checkpoint
_handles: WeakKeyDictionary[nn.Module, lowtide.Handle] = WeakKeyDictionary()


def enable(model: nn.Module, backend: str | None = "torch", interval: int | None = None, **options: Any) -> None:
    if backend is None:
        raise ValueError("enable() without a backend would enable nothing")
    _handles[model] = lowtide.attach(model, backend=backend, interval=interval, **options)


def disable(model: nn.Module) -> None:
    _handles.pop(model).detach()


def stats() -> dict[str, int]:
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
    """Case 24 asks how words are read; one of its words names a backend that this version does not have."""
    return controls.parse_switch(value, (*controls.BACKENDS, "unsloth"))


def schedule(depth: int, interval: int, stride: int | None = None) -> list[int]:
    treatments = whole_blocks(depth, interval, stride).treatments
    return [index for index, treatment in enumerate(treatments) if treatment != KEPT]
