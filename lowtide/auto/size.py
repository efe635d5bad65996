"""How large a step is: what tells, before each one, whether the plan for an earlier step still does."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowtide.runtime.flatten import tensors_of

Size = tuple[int, int]
"""Bytes of the tensors among a forward's arguments, and of the weights that are trained."""


class Sizes:
    """Of one model's steps. Its modules are listed once, as it is asked in every step, and again when some have come or
    gone: a walk through a large model takes milliseconds.

    parts_changed: whether some have since somebody set it to False.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()
        self.parts_changed = False

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Size:
        if self._parts != sum(len(module._modules) for module in self._containers):
            self._look()
            self.parts_changed = True
        given = sum(tensor.nbytes for tensor in tensors_of((args, dict(kwargs))))
        weights = (weight for module in self._owners for weight in module._parameters.values() if weight is not None)
        return given, sum(weight.nbytes for weight in weights if weight.requires_grad)

    def _look(self) -> None:
        modules = list(self._model.modules())
        self._containers = [module for module in modules if module._modules]
        self._owners = [module for module in modules if module._parameters]
        self._parts = sum(len(module._modules) for module in self._containers)
