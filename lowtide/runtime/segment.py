"""Identity-traced segments: calls recorded as they run, replayed once in backward. The core of lowtide.

A segment is a run of neighbouring calls recomputed as one. While a call runs, autograd's saved tensors are replaced by
place-holders; the first one that backward reads replays the segment's calls, in order and each in the context that it
first ran in, and every place-holder gets its tensor. The autograd graph is never cut: only saved values are recomputed.

Rules, each found by breaking an experiment (docs/engine.md tells users what follows from them):
 1. A place-holder owns its recomputed value until autograd takes it; the segment holds its place-holders weakly.
    Otherwise a whole replay stays alive as long as the segment does. A graph that is kept is recomputed again.
 2. The engine holds the open segment weakly; place-holders own it. Otherwise the last one outlives backward.
 3. Externals are held detached, with their requires_grad flag and a weak reference for identity. Otherwise a tensor
    made from the segment's own outputs closes a cycle through C++ that no collector can see.
 4. A replay publishes its values only when it is complete, so an out-of-memory in it can be tried again.
 5. A BaseException in a block rolls the call back and closes the segment. The early stop is itself a BaseException,
    and packing tolerates calls past the recorded end.
 6. A segment goes on while the largest grad-requiring argument that is not already one of its externals was made
    inside it; where a row names the carry, the row decides.
 7. It closes by block index and by number of calls. A block called over and over must not join it for ever.
 8. Identity is object, version and address. A block that changes its argument in place is an error at forward.
 9. Leaves of arguments are an allow-list (see flatten.py); other objects may be mutated unseen: the block is kept.
10. A weight changed or exchanged between forward and backward is an error, unless a library that moves weights has
    hooks there.
11. Every call captures and restores its own context (see context.py); what torch decides at first use, after it.
12. No early stop where a module has forward hooks or a patched forward: they would be skipped.
13. A mismatch names the block and the likely causes.
14. Reading saved tensors inside a block works, because values belong to place-holders.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as nn_module

from lowtide.errors import ReplayError
from lowtide.runtime.comparison import compare, sample_of
from lowtide.runtime.context import Context, RandomStates, default_generators, read_random, write_random
from lowtide.runtime.flatten import Arguments, rebuild_call, tensors_of
from lowtide.runtime.placeholder import (
    PLAIN_TYPES,
    External,
    Hold,
    PlaceHolder,
    Weight,
    address_of,
    nobody,
    packs_outside,
    unpack,
    version_of,
)
from lowtide.runtime.selective import KernelLog

_STRIDED = torch.strided


class StopReplay(BaseException):
    """Everything that backward needs has been recomputed. Not an Exception: a block must not swallow it (rule 5)."""


class Call:
    """One recorded call: what to run, with which arguments and context, and what it saved."""

    __slots__ = (
        "arguments",
        "captured",
        "compared",
        "complete",
        "debug",
        "drops",
        "facts",
        "function",
        "holders",
        "kernels",
        "last",
        "name",
        "on_replay",
        "places",
        "random",
        "roots",
        "samples",
        "sources",
        "spot_check",
        "wanted",
        "weights_may_move",
    )

    def __init__(self, name: str, function: Callable[..., Any], roots: tuple[nn.Module, ...] | None) -> None:
        self.name = name
        self.function = function
        self.roots = roots  # modules that run in it; None: unknown
        self.arguments: Arguments
        self.sources: list[int | tuple[int, int]]  # a leaf: index of an external, or (call, output leaf)
        self.captured: list[Any]
        self.random: RandomStates = []
        self.holders: list[Callable[[], PlaceHolder | None]] = []
        self.facts: list[tuple[Any, ...]] = []  # shape, dtype, device of each saved tensor
        self.places: list[tuple[int, int]] = []  # its address and version
        self.samples: dict[int, list[float]] = {}  # a few values of some
        self.drops = False  # whether it saved anything that must be recomputed
        self.wanted: set[int] | None = None  # output leaves that later calls of the segment take
        self.on_replay: Callable[[], None] | None = None
        self.weights_may_move: Callable[[], bool] | None = None  # asked where a weight is at another address
        self.complete = False  # False while it runs: a block may read its own saved tensors (rule 14)
        self.compared = True
        self.spot_check = False  # compare a few values of the last saved tensor, on the CPU
        self.debug = False  # compare a few values of every saved tensor, on any device
        self.last: tuple[int, torch.Tensor] | None = None
        self.kernels: KernelLog | None = None  # keeps what its attention kernels give out

    def packer(self, segment: "Segment", kept_addresses: set[int] | frozenset[int]) -> Callable[[torch.Tensor], Any]:
        """The saved-tensor hook of its forward. Runs once a saved tensor, so it does the least it can."""
        hold, note_facts, note_place = self.holders.append, self.facts.append, self.places.append
        watched = self.spot_check or self.debug
        # Saved variables keep this hook alive: it must not keep a segment that drops nothing.
        alive = cast("Callable[[], Segment]", weakref.ref(segment))

        def pack(tensor: torch.Tensor) -> PlaceHolder | Weight:
            address = tensor.data_ptr() if type(tensor) in PLAIN_TYPES and tensor.layout is _STRIDED else 0
            note_facts((tensor.shape, tensor.dtype, tensor.device))
            note_place((address, tensor._version))
            if watched:
                self.watch(tensor)
            if address in kept_addresses:
                hold(nobody)
                return Weight(tensor, self.name)
            holder = PlaceHolder(alive())
            hold(weakref.ref(holder))
            return holder

        return pack

    def watch(self, tensor: torch.Tensor) -> None:
        """Asked before a saved tensor is entered, where values are compared."""
        self.last = len(self.holders), tensor
        if self.debug and (sample := sample_of(tensor, any_device=True)) is not None:
            self.samples[len(self.holders)] = sample

    def finish(self) -> None:
        self.complete = True
        self.drops = any(alive is not nobody for alive in self.holders)
        last, self.last = self.last, None
        if last is not None and (sample := sample_of(last[1])) is not None:
            self.samples[last[0]] = sample
        if self.kernels is not None:
            self.kernels.finish(self.drops)


class Depth(threading.local):
    """How deep this thread is inside recorded or replayed calls."""

    value = 0


class Nesting(threading.local):
    """Where this thread is in one handle's calls. depth: inside of those that are recorded or replayed: blocks called
    there are part of them, also for handles that follow on the same model while graphs of this one are alive."""

    def __init__(self, depth: Depth | None = None) -> None:
        self._depth = Depth() if depth is None else depth
        self.outside: tuple[Any, Any] | None = None  # in a kept block under hooks of ours: those outside, and ours
        self.open: dict[Any, weakref.ref[Segment]] = {}

    @property
    def depth(self) -> int:
        return self._depth.value

    @depth.setter
    def depth(self, value: int) -> None:
        self._depth.value = value


class Segment:
    """Calls that are recomputed together. One is open a stack and thread; see Tracer."""

    def __init__(
        self,
        context: Context,
        accelerator: str | None,
        nesting: Nesting,
        *,
        early_stop: bool = True,
        hold: Hold | None = None,
        flush: Callable[[], None] | None = None,
    ) -> None:
        self.hold = hold  # lets an external wait in CPU memory, see store.py
        self.flush = flush  # starts the copies of what ``hold`` took
        self.context = context
        self.accelerator = accelerator
        self.nesting = nesting
        self.early_stop = early_stop
        self.packs_outside = packs_outside()
        self.calls: list[Call] = []
        self.externals: list[External] = []
        self.number = self.position = -1  # the planned segment and the last unit that joined, see Tracer
        self.label: int | None = None  # its number in the receipt
        self.counted = 0  # externals that the ledger has seen
        self._external_of: dict[int, int] = {}
        self._produced: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int, int]] = {}
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ recording

    def made(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(call, output leaf) that made this very tensor, unchanged since (rule 8); None if it came from outside."""
        entry = self._produced.get(id(tensor))
        if entry is None:
            return None
        alive, call, leaf, version, address = entry
        if alive() is tensor and version_of(tensor) == version and address_of(tensor) == address:
            return call, leaf
        return None

    def knows(self, tensor: torch.Tensor) -> bool:
        index = self._external_of.get(id(tensor))
        return index is not None and self.externals[index].is_still(tensor)

    def reason_to_end(self, leaves: Sequence[torch.Tensor], carry: Sequence[torch.Tensor]) -> str | None:
        """Rule 6: None if the segment goes on with these arguments, else why it cannot."""
        if carry:
            strange = next((tensor for tensor in carry if self.made(tensor) is None), None)
            return None if strange is None else _told_origin(strange)
        fresh = [tensor for tensor in leaves if tensor.requires_grad and not self.knows(tensor)]
        if not fresh:
            return "no argument that needs a gradient comes from the block before"
        largest = max(fresh, key=torch.Tensor.numel)
        return None if self.made(largest) is not None else _told_origin(largest)

    def record(
        self, call: Call, arguments: Arguments, leaves: list[torch.Tensor], generators: Sequence[torch.Generator]
    ) -> None:
        """Take a call's arguments and context in, just before it runs (rule 11)."""
        call.arguments = arguments
        call.sources = [self._source(tensor) for tensor in leaves]
        call.captured = self.context.capture()
        call.random = read_random(generators)
        self.calls.append(call)

    def _source(self, tensor: torch.Tensor) -> int | tuple[int, int]:
        key = id(tensor)
        index = self._external_of.get(key)
        if index is not None and self.externals[index].is_still(tensor):
            return index
        made = self.made(tensor) if self._produced else None
        if made is not None:
            producer = self.calls[made[0]]
            producer.wanted = (producer.wanted or set()) | {made[1]}
            return made
        self._external_of[key] = number = len(self.externals)
        self.externals.append(External(tensor, self.hold))
        return number

    def run(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[torch.Tensor],
        *,
        kept_addresses: set[int] | frozenset[int] = frozenset(),
        register_outputs: bool,
        on_pack: Callable[[torch.Tensor], None] | None = None,
        copy_meanwhile: bool = True,
    ) -> Any:
        """Run a recorded call under place-holders. Rolls it back on any exception (rule 5).

        copy_meanwhile: what moves of its arguments is copied while it runs, if it is certain to be held. Else after it.
        """
        if self.flush is not None and copy_meanwhile and any(leaf.requires_grad for leaf in leaves):
            self.flush()
        versions = [version_of(tensor) for tensor in leaves]
        pack = call.packer(self, kept_addresses)
        if on_pack is not None:
            pack = functools.partial(_pack_counted, pack, on_pack)
        function = call.function if call.kernels is None else call.kernels.recording(call, self, pack, on_pack)
        try:
            with saved_tensors_hooks(pack, unpack):
                output = function(*args, **kwargs)
            call.finish()
            self.context.settle(call.captured)
            if call.drops and versions != [version_of(tensor) for tensor in leaves]:
                raise _changed_argument(call, leaves, versions)
        except BaseException:
            call.last = None  # its graph holds the hook, which holds the call
            if self.calls and self.calls[-1] is call:
                self.calls.pop()
            raise
        finally:
            if len(self.calls) == 1 and call.complete and not call.drops:
                self.externals.clear()  # it holds nothing for anybody
            if self.flush is not None:
                self.flush()
        if register_outputs:
            self._register(output)
        return output

    def _register(self, output: Any) -> None:
        number = len(self.calls) - 1
        for leaf, tensor in enumerate(tensors_of(output)):
            if not self.knows(tensor) and self.made(tensor) is None:  # a block may return its input
                entry = (weakref.ref(tensor), number, leaf, version_of(tensor), address_of(tensor))
                self._produced[id(tensor)] = entry

    # ------------------------------------------------------------------ replaying

    def replay(self) -> None:
        """Recompute every call that a living place-holder still needs, and hand the values out (rule 4)."""
        nesting = self.nesting
        with self._lock:
            end = self._needed()
            outside = self._fetch(end)
            before = read_random(self._generators(end))
            grad = torch.is_grad_enabled()
            made: dict[tuple[int, int], torch.Tensor] = {}
            nesting.depth += 1
            torch._C._set_grad_enabled(True)
            try:
                recomputed = [self._replay_call(number, outside, made, number == end - 1) for number in range(end)]
            finally:
                torch._C._set_grad_enabled(grad)
                nesting.depth -= 1
                write_random(before)
            for number, values in enumerate(recomputed):
                _publish(self.calls[number].holders, values)

    def _fetch(self, end: int) -> dict[int, torch.Tensor]:
        """The externals that calls up to ``end`` take. Others' hooks may recompute them, so no flag is up yet."""
        names = {source: call.name for call in self.calls[:end] for source in call.sources if isinstance(source, int)}
        # In the order in which what waits in CPU memory comes back: last used first.
        return {source: self.externals[source].fetch(names[source]) for source in sorted(names, reverse=True)}

    def _needed(self) -> int:
        for number in range(len(self.calls), 1, -1):
            for alive in self.calls[number - 1].holders:
                holder = alive()
                if holder is not None and holder.value is None:
                    return number
        return min(1, len(self.calls))

    def _generators(self, end: int) -> list[torch.Generator]:
        now = default_generators(self.accelerator, set()) if self.accelerator is not None else []
        known = {id(generator): generator for generator in now}
        for call in self.calls[:end]:
            known.update({id(generator): generator for generator, _ in call.random})
        return list(known.values())

    def _replay_call(
        self, number: int, outside: dict[int, torch.Tensor], made: dict[tuple[int, int], torch.Tensor], last: bool
    ) -> list[Any]:
        call = self.calls[number]
        leaves = [outside[source] if isinstance(source, int) else made[source] for source in call.sources]
        weights, hooked = _weights_and_hooks(call.roots)
        collector = Collector(len(call.facts), stop=last and self.early_stop and hooked is False)  # rule 12
        args, kwargs = rebuild_call(call.arguments, leaves)
        write_random(call.random)
        output = self._run_again(call, args, kwargs, collector)
        if call.on_replay is not None:
            call.on_replay()
        compare(call, collector.values, collector.extra, weights if hooked is False else None)
        if [value._version for value in collector.values] != collector.versions:  # hooks switch autograd's check off
            raise ReplayError(
                f"{call.name}: a tensor that its gradient needs was modified by an inplace operation inside it, after "
                "it was saved. A plain run raises the same error."
            )
        if not last and call.wanted is not None:
            for leaf, tensor in enumerate(tensors_of(output)):
                if leaf in call.wanted:
                    made[number, leaf] = tensor.detach().requires_grad_(tensor.requires_grad)
        return collector.values

    def _run_again(self, call: Call, args: list[Any], kwargs: dict[str, Any], collector: "Collector") -> Any:
        function = call.function if call.kernels is None else call.kernels.replaying(call, collector)
        try:
            if call.captured == self.context.capture():
                with saved_tensors_hooks(collector.pack, _as_it_is):
                    return function(*args, **kwargs)
            with self.context.restored(call.captured), saved_tensors_hooks(collector.pack, _as_it_is):
                return function(*args, **kwargs)
        except StopReplay:
            if not collector.stopped:
                raise
        return None


class Collector:
    """Takes the saved tensors of one replayed call; stops it after the last one that the forward saved."""

    __slots__ = ("expected", "extra", "stop", "stopped", "values", "versions")

    def __init__(self, expected: int, stop: bool) -> None:
        self.expected = expected
        self.stop = stop
        self.stopped = False
        self.extra = 0
        self.values: list[Any] = []  # tensors; of what attention kernels saved and is kept, StandIns
        self.versions: list[int] = []

    def pack(self, tensor: Any) -> Any:
        if tensor.requires_grad:
            tensor = tensor.detach()  # with its graph, a saved output would keep its own node alive for ever
        values = self.values
        if len(values) < self.expected:
            values.append(tensor)
            self.versions.append(tensor._version)
            if self.stop and len(values) == self.expected:
                self.stopped = True
                raise StopReplay
        else:
            self.extra += 1  # rule 5: past the end
        return tensor


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _pack_counted(
    pack: Callable[[torch.Tensor], Any], count: Callable[[torch.Tensor], None], tensor: torch.Tensor
) -> Any:
    packed = pack(tensor)
    if isinstance(packed, PlaceHolder):
        count(tensor)
    return packed


def _publish(holders: list[Callable[[], PlaceHolder | None]], values: list[Any]) -> None:
    for alive, value in zip(holders, values, strict=False):
        holder = alive()
        if holder is not None and holder.value is None:
            holder.value = value


def _weights_and_hooks(roots: tuple[nn.Module, ...] | None) -> tuple[set[int], bool | None]:
    """Addresses of the weights under ``roots``; whether a module there has hooks (None: nobody knows the modules)."""
    weights: set[int] = set()
    if roots is None:
        return weights, None
    hooked = bool(nn_module._global_forward_hooks)
    pending: list[nn.Module | None] = list(roots)
    for module in pending:
        if module is None:
            continue
        state = module.__dict__
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
            hooked = True
        for weight in state["_parameters"].values():
            if type(weight) is nn.Parameter:
                weights.add(weight.data_ptr())
        if state["_modules"]:
            pending.extend(state["_modules"].values())
    return weights, hooked


def _changed_argument(call: Call, leaves: list[torch.Tensor], versions: list[int]) -> ReplayError:
    changed = next(t for t, version in zip(leaves, versions, strict=True) if version_of(t) != version)
    return ReplayError(  # rule 8
        f"{call.name}: an argument of shape {tuple(changed.shape)} was modified by an inplace operation inside the "
        "block, so the block cannot be recomputed from it. Let the block work on a copy, or keep this block."
    )


def _told_origin(tensor: torch.Tensor) -> str:
    maker = f"made by {type(tensor.grad_fn).__name__}" if tensor.grad_fn is not None else "a leaf"
    return f"its argument of shape {tuple(tensor.shape)} is not what the block before returned ({maker})"
