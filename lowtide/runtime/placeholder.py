"""What stands in the autograd graph where a saved tensor was."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from lowtide.errors import ReplayError

if TYPE_CHECKING:
    from lowtide.runtime.segment import Segment

PLAIN_TYPES = (torch.Tensor, nn.Parameter)


class PlaceHolder:
    """Stands for one saved tensor; owns its segment and, once replayed, the value (rules 1 and 2 in segment.py).

    The value is handed out once: kept until autograd releases the node, it would outlive its use by a whole operation.
    """

    __slots__ = ("__weakref__", "handed_out", "segment", "value")

    def __init__(self, segment: "Segment") -> None:
        self.segment = segment
        self.value: torch.Tensor | None = None
        self.handed_out: Callable[[], torch.Tensor | None] = nobody

    def take(self) -> torch.Tensor:
        value = self.value
        if value is None and (value := self._still_in_use()) is None:
            value = self._recomputed()
        self.value = None
        self.handed_out = weakref.ref(value)
        return value

    def _still_in_use(self) -> torch.Tensor | None:
        """What an autograd function that reads its saved tensors twice holds from the first time."""
        return self.handed_out()

    def _recomputed(self) -> torch.Tensor:
        self.segment.replay()
        if self.value is None:
            raise ReplayError("a saved tensor was read after its segment had been recomputed without it; please report")
        return self.value


class Weight:
    """Stands for a saved tensor that is kept as it is, a weight most often. Checked as autograd would."""

    __slots__ = ("name", "tensor", "version")
    moved = False

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.version, self.name = tensor.detach(), version_of(tensor), name

    def take(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise ReplayError(
                f"a tensor that {self.name} saved was modified by an inplace operation before its backward"
            )
        return self.tensor


class Packed(Protocol):
    """What stands for a saved tensor. moved: it waits in CPU memory."""

    moved: bool

    def take(self) -> torch.Tensor: ...


Hold = Callable[[torch.Tensor], Packed | None]
"""Gives a ticket where a tensor is to wait in CPU memory, else None."""
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Passed:
    """Stands for a tensor that somebody else's saved-tensor hooks have packed."""

    __slots__ = ("packed", "unpack")
    moved = False

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def take(self) -> torch.Tensor:
        return self.unpack(self.packed)


def held_elsewhere(tensor: torch.Tensor, hold: Hold | None, outside: Hooks | None) -> Packed | None:
    """Who holds a tensor: ``hold``'s ticket, else the hooks outside (rule 23); None: nobody, it stays as it is."""
    if hold is not None and (ticket := hold(tensor)) is not None:
        return ticket
    return Passed(tensor.detach(), outside) if outside is not None else None


def unpack(holder: Packed) -> torch.Tensor:
    """Saved-tensor hook: the tensor behind a place-holder, recomputed on the first read of its segment."""
    return holder.take()


def nobody() -> None:
    """Stands for the place-holder of a weight that was kept: there is none to wait for."""


class External:
    """A tensor that came into a segment from outside, detached (rule 3 in segment.py).

    Where neither ``hold`` takes it nor saved-tensor hooks are active outside the segment, it stays as it is.
    """

    __slots__ = ("address", "alive", "held", "requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, hold: Hold | None = None) -> None:
        self.alive = weakref.ref(tensor)
        self.requires_grad = tensor.requires_grad
        self.version = version_of(tensor)
        self.address = address_of(tensor)
        self.held = held_elsewhere(tensor, hold, _top_saved_tensors_default_hooks(False))
        self.tensor = tensor.detach() if self.held is None else None

    @property
    def moved(self) -> bool:
        return self.held is not None and self.held.moved

    def is_still(self, tensor: torch.Tensor) -> bool:
        return (
            self.alive() is tensor
            and self.version == version_of(tensor)
            and self.address == address_of(tensor)
            and self.requires_grad == tensor.requires_grad
        )

    def fetch(self, name: str) -> torch.Tensor:
        """A fresh leaf over the same values."""
        if self.held is not None:
            leaf = self.held.take().detach()
        else:
            assert self.tensor is not None
            if version_of(self.tensor) != self.version:
                raise ReplayError(
                    f"an argument of {name} has been modified by an inplace operation between forward and backward, "
                    "so the block cannot be recomputed. Make the change on a copy (`x = x + y` instead of `x += y`), "
                    "or keep this block."
                )
            leaf = self.tensor.detach()
        return leaf.requires_grad_() if self.requires_grad else leaf


def packs_outside() -> Callable[[torch.Tensor], Any] | None:
    """The pack hook of whoever is outside: a segment must not span two such regions, each replayed alone."""
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None else None


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Address of plain tensors; 0 for subclasses, which may have no storage of their own."""
    return tensor.data_ptr() if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided else 0
