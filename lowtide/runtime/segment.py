"""Identity-traced segments: calls recorded as they run, replayed once in backward. The core of lowtide.

A segment is a run of neighbouring calls recomputed as one. While a call runs, autograd's saved tensors are replaced by
place-holders; the first one that backward reads replays the segment's calls, in order and each in the context that it
first ran in, and every place-holder gets its tensor. The autograd graph is never cut: only saved values are recomputed.

Rules, each found by breaking an experiment (docs/engine.md tells users what follows from them):
 1. A place-holder owns its recomputed value; the segment holds its place-holders weakly. Otherwise a whole replay
    stays alive as long as the segment does.
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
11. Every call captures and restores its own context (see context.py).
12. No early stop where a module has forward hooks or a patched forward: they would be skipped.
13. A mismatch names the block and the likely causes.
14. Reading saved tensors inside a block works, because values belong to place-holders.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from lowtide.errors import ReplayError
from lowtide.runtime.context import Context, RandomState, default_generators
from lowtide.runtime.flatten import Structure, flatten, rebuild, tensors_of

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_SAMPLES = 4


class StopReplay(BaseException):
    """Everything that backward needs has been recomputed. Not an Exception: a block must not swallow it (rule 5)."""


class PlaceHolder:
    """Stands in the autograd graph for one saved tensor; owns its segment and, once replayed, the value (rules 1, 2)."""

    __slots__ = ("__weakref__", "segment", "value")

    def __init__(self, segment: "Segment") -> None:
        self.segment = segment
        self.value: torch.Tensor | None = None


class External:
    """A tensor that came into a segment from outside, detached (rule 3).

    Where saved-tensor hooks of the user are active outside the segment, they pack it (rule 23), so that somebody's
    offload of saved tensors sees the segment's boundaries too.
    """

    __slots__ = ("alive", "packed", "requires_grad", "tensor", "unpack", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alive = weakref.ref(tensor)
        self.requires_grad = tensor.requires_grad
        self.version = version_of(tensor)
        self.tensor: torch.Tensor | None = tensor.detach()
        self.unpack: Callable[[Any], torch.Tensor] | None = None
        self.packed: Any = None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None:
            pack, self.unpack = hooks
            self.packed, self.tensor = pack(self.tensor), None

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self.alive() is tensor and self.version == version_of(tensor)

    def fetch(self, name: str) -> torch.Tensor:
        if self.unpack is not None:
            tensor = self.unpack(self.packed).detach()
        else:
            tensor = self.tensor
            if version_of(tensor) != self.version:
                raise ReplayError(
                    f"an argument of {name} has been modified by an inplace operation between forward and backward, "
                    "so the block cannot be recomputed. Make the change on a copy (`x = x + y` instead of `x += y`), "
                    "or keep this block."
                )
            tensor = tensor.detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


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
        "name",
        "on_replay",
        "random",
        "roots",
        "sample",
        "sources",
        "structure",
        "wanted",
    )

    def __init__(self, name: str, function: Callable[..., Any], roots: tuple[nn.Module, ...] | None) -> None:
        self.name = name
        self.function = function
        self.roots = roots  # modules that run in it; None: unknown
        self.structure: Structure
        self.sources: list[int | tuple[int, int]] = []  # a leaf: index of an external, or (call, output leaf)
        self.holders: list[Callable[[], PlaceHolder | None]] = []
        self.drops = False  # whether it saved anything that must be recomputed
        self.facts: list[tuple[Any, ...]] = []  # of each saved tensor, see facts_of
        self.sample: list[float] | None = None
        self.wanted: set[int] = set()  # output leaves that later calls of the segment take
        self.captured: tuple[Any, ...]
        self.random: RandomState | None
        self.on_replay: Callable[[], None] | None = None
        self.compared = True
        self.debug = False  # compare values of every saved tensor, on any device
        self.complete = False  # False while it runs: a block may read its own saved tensors (rule 14)


class Nesting(threading.local):
    """How deep this thread is inside recorded or replayed calls of one handle: blocks called there are part of them."""

    def __init__(self) -> None:
        self.depth = 0
        self.open: dict[Any, weakref.ref[Segment]] = {}

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


class Segment:
    """Calls that are recomputed together. One is open a stack and thread; see Tracer."""

    def __init__(
        self,
        context: Context,
        accelerator: str | None,
        nesting: "Nesting",
        *,
        early_stop: bool = True,
        keep_random: bool = True,
    ) -> None:
        self.context = context
        self.accelerator = accelerator
        self.nesting = nesting
        self.early_stop = early_stop
        self.keep_random = keep_random
        self.calls: list[Call] = []
        self.externals: list[External] = []
        self.number = self.position = -1  # the planned segment and the last unit that joined, see Tracer
        self.label: int | None = None  # its number in the receipt
        self.counted = 0  # externals that the ledger has seen
        self._external_of: dict[int, int] = {}
        self._produced: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int, int]] = {}
        self._lock = threading.RLock()
        self._packing: Call | None = None
        self._kept_addresses: frozenset[int] | set[int] = frozenset()
        self._last: torch.Tensor | None = None

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
        self, call: Call, structure: Structure, leaves: list[torch.Tensor], generators: Sequence[torch.Generator]
    ) -> None:
        """Take a call's arguments and context in, just before it runs."""
        call.structure = structure
        call.sources = [self._source(tensor) for tensor in leaves]
        call.captured = self.context.capture()
        call.random = RandomState(generators) if self.keep_random else None
        self.calls.append(call)

    def _source(self, tensor: torch.Tensor) -> int | tuple[int, int]:
        key = id(tensor)
        index = self._external_of.get(key)
        if index is not None and self.externals[index].is_still(tensor):
            return index
        made = self.made(tensor)
        if made is not None:
            self.calls[made[0]].wanted.add(made[1])
            return made
        self._external_of[key] = len(self.externals)
        self.externals.append(External(tensor))
        return len(self.externals) - 1

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
    ) -> Any:
        """Run a recorded call under place-holders. Rolls it back on any exception (rule 5)."""
        versions = [version_of(tensor) for tensor in leaves]
        self._packing, self._kept_addresses = call, kept_addresses
        pack = self._pack if on_pack is None else _both(on_pack, self._pack)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                output = call.function(*args, **kwargs)
            if call.drops:
                self._check_arguments(call, leaves, versions)
                call.sample = sample_of(self._last)
            call.complete = True
        except BaseException:
            self._roll_back(call)
            raise
        finally:
            self._packing = self._last = None
        if register_outputs:
            self._register(output)
        return output

    def _pack(self, tensor: torch.Tensor) -> "PlaceHolder | Weight":
        call = self._packing
        assert call is not None
        address = address_of(tensor)
        if address in self._kept_addresses:
            call.holders.append(_nobody)
            call.facts.append(facts_of(tensor, address, call.debug))
            self._last = tensor
            return Weight(tensor, call.name)
        holder = PlaceHolder(self)
        call.drops = True
        call.holders.append(weakref.ref(holder))
        call.facts.append(facts_of(tensor, address, call.debug))
        self._last = tensor
        return holder

    def _check_arguments(self, call: Call, leaves: list[torch.Tensor], versions: list[int]) -> None:
        for tensor, version in zip(leaves, versions, strict=True):
            if version_of(tensor) != version:  # rule 8
                raise ReplayError(
                    f"{call.name}: an argument of shape {tuple(tensor.shape)} was modified by an inplace operation "
                    "inside the block, so the block cannot be recomputed from it. Let the block work on a copy, or "
                    "keep this block."
                )

    def _roll_back(self, call: Call) -> None:
        if self.calls and self.calls[-1] is call:
            self.calls.pop()

    def _register(self, output: Any) -> None:
        number = len(self.calls) - 1
        for leaf, tensor in enumerate(tensors_of(output)):
            key = id(tensor)
            if not self.knows(tensor) and self.made(tensor) is None:  # a block may return its input
                entry = (weakref.ref(tensor), number, leaf, version_of(tensor), address_of(tensor))
                self._produced[key] = entry

    # ------------------------------------------------------------------ replaying

    def replay(self) -> None:
        """Recompute every call that a living place-holder still needs, and hand the values out (rule 4)."""
        with self._lock:
            end = self._needed()
            recomputed: list[tuple[Call, list[torch.Tensor | None]]] = []
            made: dict[tuple[int, int], torch.Tensor] = {}
            generators = self._generators()
            before = RandomState(generators) if self.keep_random else None
            try:
                with self.nesting, torch.enable_grad():
                    for number in range(end):
                        call = self.calls[number]
                        recomputed.append((call, self._replay_call(number, made, last=number == end - 1)))
            finally:
                if before is not None:
                    before.restore()
            for call, values in recomputed:
                _publish(call, values)

    def _needed(self) -> int:
        for number in range(len(self.calls), 0, -1):
            for alive in self.calls[number - 1].holders:
                holder = alive()
                if holder is not None and holder.value is None:
                    return number
        return 0

    def _generators(self) -> list[torch.Generator]:
        known = {id(generator): generator for generator in default_generators(self.accelerator, set())}
        for call in self.calls:
            if call.random is not None:
                known.update({id(generator): generator for generator, _ in call.random.states})
        return list(known.values())

    def _replay_call(self, number: int, made: dict[tuple[int, int], torch.Tensor], last: bool) -> list[Any]:
        call = self.calls[number]
        leaves = [
            self.externals[source].fetch(call.name) if isinstance(source, int) else made[source]
            for source in call.sources
        ]
        args, kwargs = rebuild(call.structure, leaves)
        if call.random is not None:
            call.random.restore()
        weights, hooked = _weights_and_hooks(call.roots)
        collector = Collector(call, stop=last and self.early_stop and hooked is False)
        different = self.context.differs(call.captured)
        output = None
        try:
            with (
                self.context.restored(call.captured) if different else nullcontext(),
                torch.autograd.graph.saved_tensors_hooks(collector.pack, collector.unpack),
            ):
                output = call.function(*args, **kwargs)
        except StopReplay:
            if not collector.stopped:
                raise
        if call.on_replay is not None:
            call.on_replay()
        collector.check(weights, moved=hooked is not False)
        if not last:
            self._hand_over(number, call, output, made)
        return collector.values

    def _hand_over(self, number: int, call: Call, output: Any, made: dict[tuple[int, int], torch.Tensor]) -> None:
        for leaf, tensor in enumerate(tensors_of(output)):
            if leaf in call.wanted:
                made[number, leaf] = tensor.detach().requires_grad_(tensor.requires_grad)


class Weight:
    """A weight that a region saved: kept as it is, since it costs nothing. Checked like autograd would."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.version, self.name = tensor, version_of(tensor), name

    def read(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise ReplayError(f"a weight of {self.name} was modified by an inplace operation before its backward.")
        return self.tensor


class Collector:
    """Takes the saved tensors of one replayed call and compares them with what the forward saw."""

    def __init__(self, call: Call, stop: bool) -> None:
        self.call = call
        self.stop = stop
        self.stopped = False
        self.values: list[torch.Tensor | None] = []
        self.facts: list[tuple[Any, ...]] = []
        self.sample: list[float] | None = None
        self._pending = [alive() is not None for alive in call.holders]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        number, total = len(self.values), len(self._pending)
        if number >= total:  # rule 5: past the end
            self.facts.append((tensor.shape,))
            return tensor
        self.facts.append(facts_of(tensor, address_of(tensor), self.call.debug))
        self.values.append(tensor if self._pending[number] else None)
        if number == total - 1:
            self.sample = sample_of(tensor) if self.call.sample is not None else None
            if self.stop:
                self.stopped = True
                raise StopReplay
        return tensor

    @staticmethod
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def check(self, weights: set[int], moved: bool) -> None:
        """Rules 10 and 13."""
        expected = self.call.facts
        if not self.call.compared:
            return
        if len(self.facts) != len(expected) and (self.call.complete or len(self.facts) < len(expected)):
            raise self._mismatch(f"it saved {len(expected)} tensors in forward and {len(self.facts)} on recomputation")
        for number, (old, new) in enumerate(zip(expected, self.facts, strict=False)):
            if old[:3] != new[:3]:
                raise self._mismatch(f"saved tensor {number} was {_told(old)} in forward, {_told(new)} on recomputation")
            if not moved:
                self._check_weight(old, new, weights)
            if self.call.debug:
                self._check_values(number, old[5], new[5], old[1])
        if expected:
            self._check_values(len(expected) - 1, self.call.sample, self.sample, expected[-1][1])

    def _check_values(self, number: int, old: list[float] | None, new: list[float] | None, dtype: torch.dtype) -> None:
        if _drifted(old, new, dtype):
            raise self._mismatch(f"values of saved tensor {number} differ: {old} in forward, {new} on recomputation")

    def _check_weight(self, old: tuple[Any, ...], new: tuple[Any, ...], weights: set[int]) -> None:
        if new[3] == 0 or new[3] not in weights:
            return
        if old[3] != new[3] or old[4] != new[4]:
            raise ReplayError(
                f"{self.call.name}: a weight of shape {tuple(new[0])} was exchanged or modified by an inplace operation "
                "between forward and backward, so the recomputation would use other values. Step the optimizer, load "
                "or swap weights after backward."
            )

    def _mismatch(self, what: str) -> ReplayError:
        return ReplayError(
            f"recomputing {self.call.name} did not give what its forward saved: {what}. Likely causes: a counter, batch "
            "norm or cache that moves at every call; train()/eval() or weights changed before backward; a context "
            "manager that has ended; random numbers from a generator hidden in the block; routing that flips on ties."
        )


# ---------------------------------------------------------------------- helpers


def unpack(holder: PlaceHolder | Weight) -> torch.Tensor:
    """Saved-tensor hook: the tensor behind a place-holder, recomputed on the first read of its segment."""
    if isinstance(holder, Weight):
        return holder.read()
    if holder.value is None:
        holder.segment.replay()
    if holder.value is None:
        raise ReplayError("a saved tensor was read after its segment had been recomputed without it; please report this.")
    return holder.value


def _nobody() -> None:
    """Stands for the place-holder of a weight that was kept: there is none to wait for."""


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Address of plain tensors; 0 for subclasses, which may have no storage of their own."""
    return tensor.data_ptr() if type(tensor) in _PLAIN_TYPES else 0


def facts_of(tensor: torch.Tensor, address: int, debug: bool) -> tuple[Any, ...]:
    """Shape, dtype, device, address and version; for debugging, a few values too."""
    values = sample_of(tensor, any_device=True) if debug else None
    return tensor.shape, tensor.dtype, tensor.device, address, version_of(tensor), values


def sample_of(tensor: torch.Tensor | None, any_device: bool = False) -> list[float] | None:
    """A few values of a CPU tensor, where reading them stops nothing: a spot check against silent drift."""
    if tensor is None or type(tensor) not in _PLAIN_TYPES or not tensor.is_floating_point():
        return None
    if not (tensor.is_cpu or any_device) or tensor.is_meta:
        return None
    size = tensor.numel()
    if size == 0:
        return None
    row = tensor.view(-1) if tensor.is_contiguous() else _one_row(tensor)
    return row[:: max(1, row.numel() // _SAMPLES)].tolist()


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1:
        tensor = tensor[-1]
    return tensor.reshape(-1)


def _drifted(old: list[float] | None, new: list[float] | None, dtype: torch.dtype) -> bool:
    if old is None or new is None or old == new:
        return False
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    scale = max((abs(value) for value in old if math.isfinite(value)), default=0.0)
    return any(
        not (abs(a - b) <= tolerance * scale) and not (math.isnan(a) and math.isnan(b)) and a != b
        for a, b in zip(old, new, strict=True)
    )


def _told_origin(tensor: torch.Tensor) -> str:
    maker = f"made by {type(tensor.grad_fn).__name__}" if tensor.grad_fn is not None else "a leaf"
    return f"its argument of shape {tuple(tensor.shape)} is not what the block before returned ({maker})"


def _told(fact: tuple[Any, ...]) -> str:
    return f"{tuple(fact[0])} {str(fact[1]).removeprefix('torch.')} on {fact[2]}"


def _both(
    first: Callable[[torch.Tensor], None], then: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], Any]:
    def pack(tensor: torch.Tensor) -> Any:
        packed = then(tensor)
        first(tensor)
        return packed

    return pack


def _publish(call: Call, values: Iterable[torch.Tensor | None]) -> None:
    for alive, value in zip(call.holders, values, strict=True):
        holder = alive()
        if holder is not None and holder.value is None:
            holder.value = value


def _weights_and_hooks(roots: tuple[nn.Module, ...] | None) -> tuple[set[int], bool | None]:
    """Addresses of the weights under ``roots``; whether a module there has hooks (None: nobody knows the modules)."""
    if roots is None:
        return set(), None
    weights: set[int] = set()
    hooked = bool(nn_module._global_forward_hooks)
    pending = list(roots)
    for module in pending:
        state = module.__dict__
        for weight in state["_parameters"].values():
            if type(weight) is nn.Parameter:
                weights.add(weight.data_ptr())
        hooked = hooked or bool(state["_forward_hooks"]) or bool(state["_forward_pre_hooks"]) or "forward" in state
        pending.extend(child for child in state["_modules"].values() if child is not None)
    return weights, hooked


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], opaque: bool = False
) -> tuple[Structure, list[torch.Tensor]]:
    """Structure and tensors of a call's arguments; OpaqueArgument where one may be mutated unseen (rule 9)."""
    leaves: list[torch.Tensor] = []
    return flatten((args, kwargs), leaves, opaque), leaves
