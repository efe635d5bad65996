"""The modes that cells are measured in: settings of ``lowtide.attach``, and ways of recomputing to compare with."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lowtide
from lowtide.auto.handle import AutoHandle
from lowtide.bench.diffusers_checkpoint import diffusers_checkpointing
from lowtide.bench.torch_checkpoint import checkpointed
from lowtide.bench.works import Task
from lowtide.errors import ConfigError
from lowtide.handle import Handle
from lowtide.keys import AUTO, did_you_mean

NONE = "none"
ATTACHED: Mapping[str, Mapping[str, Any]] = {
    "activation-offload": {"backend": None, "offload_attention": True},
    "ffn": {"backend": "torch-ffn"},
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "unsloth-ffn-offload": {"backend": "unsloth-ffn", "offload_attention": True},
    "layer": {"backend": "torch"},
    "layer-offload": {"backend": "torch", "offload_attention": True},
    "interval2": {"backend": "torch", "interval": 2},
    "seg2-stride4": {"backend": "torch", "interval": 2, "segment_stride": 4},
    "seg2-stride4-offload": {"backend": "torch", "interval": 2, "segment_stride": 4, "offload_attention": True},
    "unsloth": {"backend": "unsloth"},
    "selective": {"backend": "torch-selective"},
    "selective-offload": {"backend": "unsloth-selective"},
    AUTO: {"backend": AUTO},
}
"""Arguments of ``lowtide.attach`` by mode; what ``auto`` may reserve is a part of the condition."""

BASELINES: Mapping[str, Callable[[Task], AbstractContextManager[None]]] = {
    NONE: lambda task: nullcontext(),
    "torch-checkpoint": lambda task: checkpointed(task.blocks),
    "diffusers": lambda task: diffusers_checkpointing(task.model),
}
"""Ways without lowtide: nothing, torch's own checkpoint around each block, what diffusers' models bring."""

MODES = (*BASELINES, *ATTACHED)


@dataclass(frozen=True)
class Mode:
    """One mode, ready to be entered for the duration of a ``with``."""

    name: str

    @property
    def attaches(self) -> bool:
        return self.name in ATTACHED

    def enter(self, task: Task, **more: Any) -> AbstractContextManager[Handle | AutoHandle | None]:
        """more: further arguments of ``lowtide.attach``. Raises what attach raises."""
        if self.attaches:
            return lowtide.attach(task.model, **ATTACHED[self.name], **more)
        return BASELINES[self.name](task)


def mode(name: str) -> Mode:
    """Raises ConfigError for an unknown name: says which there are."""
    if name not in MODES:
        raise ConfigError(f"unknown mode {name!r}; allowed: {', '.join(MODES)}.{did_you_mean(name, MODES)}")
    return Mode(name)
