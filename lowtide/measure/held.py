"""Traces what one plain forward saves for backward: the facts that ``plan.held`` predicts from."""

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.errors import ConfigError
from lowtide.plan.held import HeldTrace, ModuleCall, TensorUse
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack


def trace_held(model: nn.Module, stacks: Sequence[ResolvedStack], inputs: Mapping[str, Any]) -> HeldTrace:
    """One forward of an un-attached model with gradients on; no backward.

    On the meta device it takes no memory. Raises ConfigError where a model's forward reads values (Lumina2), so that
    it cannot run there.
    """
    tracer = _Tracer(model, stacks)
    with ExitStack() as hooks, torch.enable_grad(), saved_tensors_hooks(tracer.pack, lambda saved: saved.tensor):
        for handle in tracer.watch():
            hooks.callback(handle.remove)
        outputs = _forward(model, inputs)
        trace = HeldTrace(tuple(tracer.calls), frozenset(tracer.glue), tracer.live(), tracer.sizes_bytes)
    del outputs  # the graph had to live until now
    return trace


def _forward(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        return model(**inputs)
    except NotImplementedError as error:
        if not any(parameter.is_meta for parameter in model.parameters()):
            raise
        raise ConfigError(
            f"the forward of {type(model).__name__} reads values of its inputs, so it cannot be traced on the meta "
            "device. Trace its tiny configuration on the CPU instead"
        ) from error


class _Saved:
    """What the graph holds in place of a saved tensor; dies with its branch of the graph."""

    def __init__(self, tensor: torch.Tensor, storage: int) -> None:
        self.tensor = tensor.detach()
        self.storage = storage


class _Region:
    """A module call that is going on: what was saved in it so far."""

    def __init__(self, module: nn.Module, arguments: tuple[TensorUse, ...], in_block: "_Region | None") -> None:
        self.module = module
        self.arguments = arguments
        self.in_block = in_block
        self.saved: set[int] = set()
        self.inner: list[ModuleCall] = []


class _Tracer:
    """Hooks on blocks and their feed-forward modules; names tensors and storages by first sight."""

    def __init__(self, model: nn.Module, stacks: Sequence[ResolvedStack]) -> None:
        self.stacks = stacks
        self.calls: list[ModuleCall] = []
        self.glue: set[int] = set()
        self.sizes_bytes: dict[int, int] = {}
        self._open: list[_Region] = []
        self._saved: WeakSet[_Saved] = WeakSet()
        self._alive: list[torch.UntypedStorage] = []
        self._numbers: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self._next_number = itertools.count()
        self._resident = {id(self._kept(tensor)) for tensor in (*model.parameters(), *model.buffers())}

    def watch(self) -> list[RemovableHandle]:
        handles = []
        for stack in self.stacks:
            for index, (path, block) in enumerate(stack.blocks):
                handles += self._watched(block, path, stack.name, index, in_block=False)
                for number, chain in enumerate(stack.chains(block)):
                    for place, (name, module) in enumerate(chain):
                        handles += self._watched(module, f"{path}.{name}", f"{path}#{number}", place, in_block=True)
        return handles

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, self._storage_of(tensor))
        (self._open[-1].saved if self._open else self.glue).add(saved.storage)
        self._saved.add(saved)
        return saved

    def live(self) -> frozenset[int]:
        return frozenset(saved.storage for saved in self._saved)

    def _watched(
        self, module: nn.Module, name: str, stack: str, index: int, in_block: bool
    ) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(self._open) == in_block:
                self._open.append(_Region(module, self._uses((args, kwargs)), self._open[-1] if self._open else None))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._open and self._open[-1].module is module:
                self._close(name, stack, index, output)

        return (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        )

    def _close(self, name: str, stack: str, index: int, output: Any) -> None:
        region = self._open.pop()
        call = ModuleCall(
            name,
            stack,
            index,
            region.arguments,
            self._uses(output),
            frozenset(region.saved),
            tuple(region.inner),
        )
        (self.calls if region.in_block is None else region.in_block.inner).append(call)

    def _uses(self, value: Any) -> tuple[TensorUse, ...]:
        return tuple(
            TensorUse(self._number_of(tensor), self._storage_of(tensor), tensor.numel(), tensor.requires_grad)
            for tensor in tensors_of(value)
        )

    def _number_of(self, tensor: torch.Tensor) -> int:
        """Names the object without keeping it, and with it the graph behind it, alive."""
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._next_number)
        return self._numbers[tensor]

    def _storage_of(self, tensor: torch.Tensor) -> int:
        storage = self._kept(tensor)
        if id(storage) not in self._resident:
            self.sizes_bytes[id(storage)] = storage.nbytes()
        return id(storage)

    def _kept(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Its storage, kept alive as long as the trace is made: so its id names it, on the meta device too."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return storage
