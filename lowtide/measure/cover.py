"""Which of a model's blocks no stack holds: what a family's row may have missed."""

from collections.abc import Iterator, Sequence

from torch import nn

from lowtide import families
from lowtide.errors import UnsupportedError
from lowtide.runtime.resolve import ResolvedStack, resolve


def uncovered(model: nn.Module, stacks: Sequence[ResolvedStack]) -> Iterator[tuple[str, list[str]]]:
    """(class, module paths) of stacks that the model's structure shows and of which ``stacks`` hold no block.

    A found block counts as held if it is in one of theirs, or one of theirs is in it, and so does what the model's
    row leaves out on purpose.
    """
    row = families.by_class(type(model).__name__)
    held = [name for stack in stacks for name, _ in stack.blocks]
    held += row.left_out if row is not None else ()
    try:
        found = resolve(model, None)
    except UnsupportedError:
        return
    for stack in found:
        names = [name for name, _ in stack.blocks]
        if not any(_overlap(name, other) for name in names for other in held):
            yield type(stack.blocks[0][1]).__name__, names


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
