"""Keeps what the attention kernels of a recorded call gave out, so that its replay never runs attention again.

In the forward a kernel runs as it is, with its own node in the autograd graph. Of what the node saves, arguments of
the kernel become ordinary place-holders; the rest (the output, its log-sum-exp, a random seed) is kept, and so is what
the kernel returned. The replay makes the arguments again, hands them to the place-holders and goes on from the kept
output. Rules (the numbering of segment.py goes on):
24. Kernel calls are matched by their order in the block; what the replay passes to one must be what the forward did.
25. What is kept is detached (rule 3), and belongs to the graph's own node or to the call's log: it dies with them.
26. An output that the block changes in place is not what the kernel gave out any more: that kernel runs again.
27. A kernel that keeps more than a few times its output's bytes (attention by plain matrix products, padded heads) is
    recomputed. It is known only after it has run, so what it saves is decided then.
28. A kernel that draws random numbers leaves the generators as they were after it, in the replay too.
29. A kernel under somebody else's saved-tensor hooks inside the block is theirs: it runs again.
30. A block that differentiates within its own forward (rule 14) needs its attention in the graph: all of it runs again.
31. The additive mask that torch makes of a boolean one can be as large as the attention matrix, and is no result: it is
    made before the kernel, and again in the replay. That of a boolean mask that outlives the call is kept all the same:
    the boolean one may be exchanged or changed before the replay.
32. A kernel inside a transform of functorch's is part of that: it runs again.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import (
    _saved_tensors_hooks_is_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    _top_saved_tensors_default_hooks,
)
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ReplayError
from lowtide.runtime.comparison import mismatch
from lowtide.runtime.context import RandomStates, read_random, write_random
from lowtide.runtime.entry_points import EntryPoint, Kernel, Watching, unwatched
from lowtide.runtime.flatten import Leaves, Structure, flatten, rebuild
from lowtide.runtime.kernel_arguments import (
    additive_mask,
    as_autocast_would,
    autocast_to,
    boolean_mask,
    draws_random,
    is_plain,
    mask_to_add,
    storage_bytes,
    tensors_among,
    with_additive_mask,
    with_mask,
)
from lowtide.runtime.placeholder import Hold, Hooks, PlaceHolder, address_of, held_elsewhere, nobody, unpack
from lowtide.runtime.transforms import transformed
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.runtime.segment import Call, Collector, Segment

MOST_KEPT = 4
"""A kernel is recomputed where keeping it would take more than so many times the bytes of its outputs."""

_NO_KERNEL = "no attention kernel was called in it, so it is recomputed whole"
_CHANGED = "its attention output is modified in place, so attention is recomputed"
_OTHERS = "saved-tensor hooks inside it take what its attention kernel saves, so attention is recomputed"
_TRANSFORMED = "its attention kernel runs inside a transform of torch.func, so attention is recomputed"
_READ = "it reads its saved tensors in its own forward, so attention is recomputed"


class Kept:
    """A tensor that a kernel saved or returned: held elsewhere, or as it is."""

    __slots__ = ("changed", "held", "name", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, hold: Hold | None, outside: Hooks | None, name: str) -> None:
        self.name = name
        self.version = tensor._version
        self.changed = False
        self.held = held_elsewhere(tensor, hold, outside)
        self.tensor = tensor.detach() if self.held is None else None

    @property
    def moved(self) -> bool:
        return self.held is not None and self.held.moved

    def is_changed(self) -> bool:
        """Whether it was changed in place after the kernel; of what is held elsewhere, before the block's end."""
        return self.changed or (self.tensor is not None and self.tensor._version != self.version)

    def take(self) -> torch.Tensor:
        if self.is_changed():
            raise ReplayError(
                f"{self.name}: what its attention kernel needs for the gradient was modified by an inplace operation "
                "before its backward. A plain run raises the same error."
            )
        if self.held is not None:
            return self.held.take()
        assert self.tensor is not None
        return self.tensor


class _Undecided:
    """Stands in the graph for a tensor that a kernel saved, until it is known whether that is kept (rule 27)."""

    __slots__ = ("tensor", "then")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.then: Kept | PlaceHolder | None = None

    def take(self) -> torch.Tensor:
        if self.then is None:  # read while the kernel still runs
            assert self.tensor is not None
            return self.tensor.detach()
        return self.then.take()


class StandIn:
    """Takes the place of a kept tensor among those of a replay: there is nothing to compare or hand out."""

    __slots__ = ("device", "dtype", "shape")
    requires_grad = False
    _version = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device


class _OfArgument:
    """A saved tensor that is argument ``number`` of the kernel: all of it, or a view (shape, strides, offset) of it."""

    __slots__ = ("number", "view")

    def __init__(self, number: int, argument: torch.Tensor, saved: torch.Tensor) -> None:
        self.number = number
        offset = saved.storage_offset() - argument.storage_offset()
        whole = offset == 0 and saved.shape == argument.shape and saved.stride() == argument.stride()
        self.view = None if whole else (saved.shape, saved.stride(), offset)

    def of(self, argument: torch.Tensor) -> torch.Tensor:
        if self.view is None:
            return argument.detach()
        shape, strides, offset = self.view
        return argument.detach().as_strided(shape, strides, argument.storage_offset() + offset)


class _Recorded:
    """One kernel call of which everything is kept that its replay needs."""

    __slots__ = ("added", "adds_mask", "arguments", "mask", "outputs", "random", "requires_grad", "saved", "structure")

    def __init__(self, arguments: list[torch.Tensor], saved: list[_OfArgument | StandIn]) -> None:
        self.arguments = [(tensor.shape, tensor.dtype, tensor.device, tensor.stride()) for tensor in arguments]
        self.saved = saved
        self.adds_mask = False
        self.mask: torch.Tensor | None = None  # boolean, while the call runs
        self.added: torch.Tensor | Kept | None = None  # what is made of it, while the call runs or kept
        self.structure: Structure
        self.outputs: list[Kept] = []
        self.requires_grad: list[bool] = []
        self.random: RandomStates = []

    def strange_argument(self, arguments: Sequence[torch.Tensor]) -> str | None:
        """How the arguments of a replay differ; None if they do not."""
        if len(arguments) != len(self.arguments):
            return f"it passes {len(self.arguments)} tensors in forward and {len(arguments)} on recomputation"
        viewed = {saved.number for saved in self.saved if isinstance(saved, _OfArgument) and saved.view is not None}
        for number, (tensor, was) in enumerate(zip(arguments, self.arguments, strict=True)):
            now = (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
            if now != was and (now[:3] != was[:3] or number in viewed):
                return f"tensor {number} that it passes was {_told(was)} in forward, {_told(now)} on recomputation"
        return None


class KernelLog:
    """The kernel calls of one recorded call, in order; None for one that a replay runs again.

    entries: the places to watch. hold: gives a ticket where a tensor is to wait in CPU memory, else None; then it stays
    on the device, or goes to the saved-tensor hooks outside the block if there are any (rule 23). on_keep: told every
    tensor that is kept, and whether it moved. on_kernel: told when a kernel is over. on_note: told why attention is
    recomputed after all.
    """

    __slots__ = ("_outside", "_packed", "calls", "entries", "hold", "on_keep", "on_kernel", "on_note", "read")

    def __init__(
        self,
        entries: Sequence[EntryPoint],
        *,
        hold: Hold | None = None,
        on_keep: Callable[[torch.Tensor, bool], None] | None = None,
        on_kernel: Callable[[], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.entries = entries
        self.hold = hold
        self.on_keep = on_keep
        self.on_kernel = on_kernel
        self.on_note = on_note
        self.calls: list[_Recorded | None] = []
        self.read = False  # before the call was over
        self._outside: Hooks | None = None
        self._packed: list[tuple[Kept, torch.Tensor]] = []  # whose changes can be seen while the call runs

    def recording(
        self,
        call: "Call",
        segment: "Segment",
        pack: Callable[[torch.Tensor], Any],
        on_pack: Callable[[torch.Tensor], None] | None,
    ) -> Callable[..., Any]:
        """The call's function, its kernels recorded. pack: the hook that it will run under. Ask outside of that."""
        self._outside = _top_saved_tensors_default_hooks(False)
        return functools.partial(_watching, self.entries, Recorder(self, call, segment, pack, on_pack), call.function)

    def replaying(self, call: "Call", collector: "Collector") -> Callable[..., Any]:
        """The call's function, its kernels not run."""
        self.read |= not call.complete
        player = Player(self, call, collector)
        return functools.partial(_watching, self.entries, player, functools.partial(player.run, call.function))

    def keep(self, tensor: torch.Tensor, name: str) -> Kept:
        kept = Kept(tensor, self.hold, self._outside, name)
        if kept.held is not None:
            self._packed.append((kept, tensor.detach()))
        if self.on_keep is not None:
            self.on_keep(tensor, kept.moved)
        return kept

    def _settle_masks(self) -> None:
        """Rule 31. What was made inside the call has died with it but for our own hold: what it was made of is there in
        the replay."""
        added = [recorded for recorded in self.calls if recorded is not None and recorded.mask is not None]
        storages = [recorded.mask.untyped_storage() for recorded in added if recorded.mask is not None]
        ours = Counter(storage._cdata for storage in storages)
        for recorded, storage in zip(added, storages, strict=True):
            alone = torch._C._storage_Use_Count(storage._cdata) <= ours[storage._cdata] + 1  # Python's object for it
            if alone:
                recorded.added = None
            elif isinstance(recorded.added, torch.Tensor):
                recorded.added = self.keep(recorded.added, recorded.outputs[0].name)
        for recorded in added:
            recorded.mask = None
        self._packed.clear()  # nobody else has what was made
        if added and self.on_kernel is not None:
            self.on_kernel()

    def note(self, reason: str) -> None:
        if self.on_note is not None:
            self.on_note(reason)

    def finish(self, drops: bool) -> None:
        """The call is over. drops: whether anything of it is recomputed."""
        for kept, tensor in self._packed:
            kept.changed = tensor._version != kept.version
        self._packed.clear()
        for number, recorded in enumerate(self.calls):
            if recorded is not None and any(map(Kept.is_changed, recorded.outputs)):
                self.calls[number] = None  # rule 26
                self.note(_CHANGED)
        self._settle_masks()
        if self.read and any(self.calls):  # rule 30
            self.calls = [None] * len(self.calls)
            self.note(_READ)
        if drops and not self.calls:
            self.note(_NO_KERNEL)
        self.hold = self.on_keep = self.on_kernel = self.on_note = self._outside = None


def _watching(entries: Sequence[EntryPoint], observer: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any):
    with Watching(entries, observer):
        return function(*args, **kwargs)


class Recorder:
    """Observes the forward of a call."""

    __slots__ = ("_call", "_log", "_on_pack", "_pack", "_segment")

    def __init__(
        self,
        log: KernelLog,
        call: "Call",
        segment: "Segment",
        pack: Callable[[torch.Tensor], Any],
        on_pack: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._log, self._call, self._segment, self._pack, self._on_pack = log, call, segment, pack, on_pack

    def call(self, entry: EntryPoint, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls, number = self._log.calls, len(self._log.calls)
        calls.append(None)
        if not torch.is_grad_enabled():
            return unwatched(kernel, args, kwargs)
        reason = _TRANSFORMED if transformed() else None if self._is_ours() else _OTHERS
        if reason is not None:
            self._log.note(reason)
            return unwatched(kernel, args, kwargs)
        if entry.autocasts:
            args, kwargs = as_autocast_would(args, kwargs)
        mask = mask_to_add(kernel, args, kwargs)
        if mask is not None:
            args, kwargs = with_additive_mask(mask, args, kwargs)
        arguments = tensors_among(args, kwargs)
        if not all(map(is_plain, arguments)):
            self._note_kind(arguments)
            return unwatched(kernel, args, kwargs)
        saves = _Saves(self._call, self._segment, arguments, self._on_pack)
        try:
            with saved_tensors_hooks(saves.pack, unpack):
                output = unwatched(kernel, args, kwargs)
            recorded = calls[number] = self._recorded(saves, arguments, output, draws_random(args, kwargs))
            if recorded is not None and mask is not None:
                recorded.adds_mask, recorded.mask, recorded.added = True, mask.detach(), additive_mask(args, kwargs)
        except BaseException:
            saves.drop()  # a block may try another kernel
            raise
        return output

    def _is_ours(self) -> bool:
        """Whether what a kernel saves now comes to the call's own hook (rule 29)."""
        if not _saved_tensors_hooks_is_enabled():
            return False
        hooks = _top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] is self._pack

    def _recorded(self, saves: "_Saves", arguments: list[torch.Tensor], output: Any, draws: bool) -> "_Recorded | None":
        if not saves.saved:
            return None
        leaves = Leaves()
        structure = flatten(output, leaves, opaque=True)
        if not leaves or not all(map(is_plain, leaves)):
            self._note_kind(leaves)
            saves.drop()
            return None
        extra_bytes = storage_bytes([*saves.undecided_tensors(), *leaves])
        if extra_bytes > MOST_KEPT * sum(tensor.nbytes for tensor in leaves):
            saves.drop()
            self._log.note(
                f"its attention kernel saves {format_bytes(extra_bytes)} of intermediate matrices, so attention is "
                "recomputed"
            )
            return None
        name = self._call.name
        recorded = _Recorded(arguments, saves.saved)
        saves.keep(lambda tensor: self._log.keep(tensor, name))
        recorded.structure = structure
        recorded.outputs = [self._log.keep(tensor, name) for tensor in leaves]
        recorded.requires_grad = [tensor.requires_grad for tensor in leaves]
        if draws:  # rule 28
            recorded.random = read_random(generator for generator, _ in self._call.random)
        if self._log.on_kernel is not None:
            self._log.on_kernel()
        return recorded

    def _note_kind(self, tensors: Sequence[torch.Tensor]) -> None:
        kind = next((type(tensor).__name__ for tensor in tensors if not is_plain(tensor)), None)
        what = f"takes or gives a {kind}" if kind is not None else "gives no tensor"
        self._log.note(f"its attention kernel {what}, so attention is recomputed")


class _Saves:
    """The saved-tensor hook of one kernel call.

    The graph keeps the hook, so the hook lets go of everything once the kernel has run.
    """

    __slots__ = ("_arguments", "_call", "_on_pack", "_segment", "_undecided", "saved")

    def __init__(
        self,
        call: "Call",
        segment: "Segment",
        arguments: list[torch.Tensor],
        on_pack: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._call: Call | None = call
        self._segment: Segment | None = segment
        self._on_pack = on_pack
        self._arguments = [(tensor.untyped_storage()._cdata, tensor) for tensor in arguments]
        self._undecided: list[tuple[int, _Undecided]] = []
        self.saved: list[_OfArgument | StandIn] = []

    def pack(self, tensor: torch.Tensor) -> PlaceHolder | _Undecided:
        call, segment = self._call, self._segment
        assert call is not None and segment is not None
        number = self._argument(tensor)
        call.facts.append((tensor.shape, tensor.dtype, tensor.device))
        if number is None:
            undecided = _Undecided(tensor)
            self._undecided.append((len(call.holders), undecided))
            self.saved.append(StandIn(tensor))
            call.places.append((0, 0))
            call.holders.append(nobody)
            return undecided
        self.saved.append(_OfArgument(number, self._arguments[number][1], tensor))
        call.places.append((tensor.data_ptr(), tensor._version))
        if call.spot_check or call.debug:
            call.watch(tensor)
        holder = PlaceHolder(segment)
        call.holders.append(weakref.ref(holder))
        if self._on_pack is not None:
            self._on_pack(tensor)
        return holder

    def _argument(self, tensor: torch.Tensor) -> int | None:
        """The argument in whose storage a saved tensor lies; of several the one that begins where it does."""
        if not is_plain(tensor):
            return None
        key, offset, found = tensor.untyped_storage()._cdata, tensor.storage_offset(), None
        for number, (storage, argument) in enumerate(self._arguments):
            if storage == key and argument.dtype == tensor.dtype:
                if argument.storage_offset() == offset:
                    return number
                found = number
        return found

    def undecided_tensors(self) -> Iterable[torch.Tensor]:
        return (undecided.tensor for _, undecided in self._undecided if undecided.tensor is not None)

    def keep(self, keep: Callable[[torch.Tensor], Kept]) -> None:
        """What is no argument is kept."""
        for _, undecided in self._undecided:
            assert undecided.tensor is not None
            undecided.then, undecided.tensor = keep(undecided.tensor), None
        self._release()

    def drop(self) -> None:
        """Everything that is not kept yet is recomputed."""
        call, segment = self._call, self._segment
        if call is None or segment is None:
            return
        for place, undecided in self._undecided:
            if undecided.tensor is None:
                continue
            if self._on_pack is not None:
                self._on_pack(undecided.tensor)
            call.places[place] = address_of(undecided.tensor), undecided.tensor._version
            holder = PlaceHolder(segment)
            call.holders[place] = weakref.ref(holder)
            undecided.then, undecided.tensor = holder, None
        self._release()

    def _release(self) -> None:
        self._call = self._segment = self._on_pack = None
        self._arguments, self._undecided, self.saved = [], [], []


class Player:
    """Observes the replay of a call: gives what was kept, and runs no kernel that was recorded."""

    __slots__ = ("_call", "_collector", "_log", "_number")

    def __init__(self, log: KernelLog, call: "Call", collector: "Collector") -> None:
        self._log, self._call, self._collector = log, call, collector
        self._number = 0

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The whole replay; rule 24 at its end."""
        output = function(*args, **kwargs)
        if self._call.complete and self._number != len(self._log.calls):
            raise self._other_number()
        return output

    def call(self, entry: EntryPoint, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._call.complete:  # rule 30
            return unwatched(kernel, args, kwargs)
        number, calls = self._number, self._log.calls
        self._number += 1
        if number >= len(calls):
            raise self._other_number()
        recorded = calls[number]
        if recorded is None or any(map(Kept.is_changed, recorded.outputs)):
            return unwatched(kernel, args, kwargs)
        if recorded.adds_mask:
            args, kwargs = self._with_mask(recorded, args, kwargs)
        arguments = tensors_among(args, kwargs)
        if entry.autocasts and len(arguments) == len(recorded.arguments):
            wanted = [was[1] for was in recorded.arguments]
            arguments = [autocast_to(tensor, dtype) for tensor, dtype in zip(arguments, wanted, strict=True)]
        strange = recorded.strange_argument(arguments)
        if strange is not None:
            raise mismatch(self._call, f"of attention call {number} {strange}")
        for saved in recorded.saved:
            self._collector.pack(saved.of(arguments[saved.number]) if isinstance(saved, _OfArgument) else saved)
        outputs = [kept.take().detach() for kept in recorded.outputs]
        leaves = [t.requires_grad_(needs) for t, needs in zip(outputs, recorded.requires_grad, strict=True)]
        write_random(recorded.random)
        return rebuild(recorded.structure, leaves)

    def _with_mask(
        self, recorded: _Recorded, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(recorded.added, Kept):
            return with_mask(recorded.added.take(), args, kwargs)
        mask = boolean_mask(args, kwargs)
        if mask is None:
            told = "it passes a boolean mask in forward and none on recomputation"
            raise mismatch(self._call, f"of attention call {self._number - 1} {told}")
        return with_additive_mask(mask, args, kwargs)

    def _other_number(self) -> ReplayError:
        forward = len(self._log.calls)
        return mismatch(
            self._call, f"it called attention {forward} times in forward and {self._number} times on recomputation"
        )


def _told(fact: tuple[Any, ...]) -> str:
    shape, dtype, device, strides = fact
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} with strides {strides} on {device}"
