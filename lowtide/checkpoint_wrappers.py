"""torch's wrappers that checkpoint modules: what FSDP's activation checkpointing puts around blocks."""

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from lowtide.runtime.resolve import ResolvedStack

_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def any_wrapper(model: nn.Module) -> bool:
    return next(_wrappers(model), None) is not None


def wrapped(model: nn.Module, stacks: Sequence[ResolvedStack]) -> list[str]:
    """Paths of the wrappers around a block of the stacks, or in one: what these hold is recomputed anyway."""
    blocks = [path for stack in stacks for path, _ in stack.blocks]
    return [path for path in _wrappers(model) if any(_nested(path, block) for block in blocks)]


def _wrappers(model: nn.Module) -> Iterator[str]:
    known = sys.modules.get(_MODULE)  # whoever wraps has imported it
    if known is not None:
        yield from (path for path, module in model.named_modules() if isinstance(module, known.CheckpointWrapper))


def _nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or not one
