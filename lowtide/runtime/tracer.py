"""Decides, call by call, what happens with a block: passes it through, keeps it, or records it into a segment.

Rules (the numbering of segment.py goes on):
15. State belongs to the handle, by id of the module; one generated class an original class (see swap.py).
21. Open segments and nesting are per thread and handle. DataParallel replicas, functorch transforms, forward-mode
    derivatives, disabled saved-tensor hooks and tracing pass through.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _saved_tensors_hooks_is_enabled  # pyright: ignore[reportAttributeAccessIssue]

from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, IN_SEGMENTS, KEPT, SAVED, SELECTIVE
from lowtide.runtime.context import Context, Provider, accelerator, default_generators
from lowtide.runtime.entry_points import EntryPoint
from lowtide.runtime.flatten import Leaves, OpaqueArgument, flatten_call
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.placeholder import Hold, Packed, packs_outside
from lowtide.runtime.segment import Call, Depth, Nesting, Segment
from lowtide.runtime.selective import KernelLog
from lowtide.runtime.store import Store
from lowtide.runtime.transforms import transformed
from lowtide.runtime.unit import MOVED, WAKES, Unit


class Tracer:
    """The live half of a handle: every intercepted call of its blocks arrives at ``run``."""

    def __init__(
        self,
        units: Sequence[tuple[nn.Module, Unit]],
        ledger: Ledger,
        providers: Sequence[Provider],
        store: Store | None = None,
        entry_points: Sequence[EntryPoint] = (),
        depth: Depth | None = None,
    ) -> None:
        self.store = store
        self.entry_points = entry_points
        self.units = {id(module): unit for module, unit in units}
        self.ledger = ledger
        self.context = Context(providers)
        self.accelerator = accelerator()
        self.nesting = Nesting(depth)
        self.active = True

    def run(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``original(module, *args, **kwargs)``, treated as the schedule says."""
        unit = self.units.get(id(module))
        if unit is None or self._passes_through() or unit.module() is not module:
            return original(module, *args, **kwargs)
        if unit.treatment == KEPT:
            return self._keep(unit, original, module, args, kwargs)
        if unit.treatment in (MOVED, WAKES):
            return self._move(unit, original, module, args, kwargs)
        try:
            arguments, leaves = flatten_call(args, kwargs)
        except OpaqueArgument as error:  # rule 9
            return self._keep_opaque(unit, str(error), original, module, args, kwargs)
        self.ledger.begin_call(unit.record, leaves)
        if self.store is not None:
            together = (unit.group, unit.number) if unit.treatment in IN_SEGMENTS else unit.record.number
            self.store.enter_block(together, unit.record.name)
        began = self.store.packs if self.store is not None else 0
        segment = self._segment_for(unit, leaves, args, kwargs)
        call = Call(unit.record.name, functools.partial(original, module), (module,))
        call.on_replay = unit.record.count_replay if unit.counts else unit.record.note_replay
        call.weights_may_move = unit.record.has_hooks_around
        call.spot_check = self.ledger.measuring
        if unit.treatment == SELECTIVE:
            call.kernels = self._kernel_log(unit)
        segment.record(call, arguments, leaves, self._generators(leaves))
        recorded = self.store.packs if self.store is not None else 0
        output = self._record(unit, segment, call, args, kwargs, leaves)
        self.ledger.end_call(unit.record, segment, call)
        if self.store is not None and unit.treatment == SELECTIVE and unit.width == 1:
            self.store.results_after_arguments(began, recorded)
        self._settle(unit)
        return output

    def _settle(self, unit: Unit) -> None:
        if self.store is not None and unit.settles:
            self.store.settle()

    def run_eagerly(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``run`` for a call from compiled code, which ends before the module and goes on after it (rule 16)."""
        output = self.run(original, module, args, kwargs)
        unit = self.units.get(id(module))
        if unit is not None:
            unit.record.in_compiled_code = True
        return output

    def _passes_through(self) -> bool:
        return (
            not torch.is_grad_enabled()
            or self.nesting.depth > 0
            or not self.active
            or not _saved_tensors_hooks_is_enabled()
            or transformed()
        )

    # ------------------------------------------------------------------ recording

    def _segment_for(
        self, unit: Unit, leaves: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Segment:
        alive = self.nesting.open.get(unit.group)
        segment = alive() if alive is not None else None
        if segment is not None and segment.number == unit.number and self._has_room(segment, unit):
            reason = segment.reason_to_end(leaves, unit.carried(args, kwargs) if unit.carry else ())
            if segment.packs_outside is not packs_outside():  # rule 23
                reason = "saved-tensor hooks outside, or another checkpoint, begin or end before it"
            if reason is None:
                return segment
            if unit.treatment in IN_SEGMENTS:
                self.ledger.fall_back(unit.record, reason)
        flush = self.store.flush if self.store is not None else None
        return Segment(self.context, self.accelerator, self.nesting, hold=self._holder(unit), flush=flush)

    def _holder(self, unit: Unit) -> Hold | None:
        """How a segment holds what it is given."""
        if self.store is None or self._others_pack():
            return None
        if unit.wakes == BOUNDARY:
            return self.store.pack_here
        if unit.moves.isdisjoint({BOUNDARY, SAVED}):
            return self.store.hold
        return self.store.move_later

    def _others_pack(self) -> bool:
        """Rule 23: hooks outside, of a checkpoint too, see the boundaries, now and when they replay. So do those that
        somebody has put inside a block."""
        here, known = packs_outside(), self.nesting.outside
        return (known[0] if known is not None and here is known[1] else here) is not None

    def _kernel_log(self, unit: Unit) -> KernelLog:
        store = None if self._others_pack() else self.store
        hold = None if store is None else store.move if ATTENTION in unit.moves else store.hold
        return KernelLog(
            self.entry_points,
            hold=hold,
            on_keep=self.ledger.keeper(unit.record),
            on_kernel=store.flush if store is not None else None,
            on_note=functools.partial(self.ledger.fall_back, unit.record),
        )

    @staticmethod
    def _has_room(segment: Segment, unit: Unit) -> bool:
        return segment.position < unit.position and len(segment.calls) < unit.width  # rule 7

    def _record(
        self,
        unit: Unit,
        segment: Segment,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[torch.Tensor],
    ) -> Any:
        segment.number, segment.position = unit.number, unit.position
        more = len(segment.calls) < unit.width
        # The last module of a chain, alone: what it drops must be worth the input it would hold instead.
        alone = unit.treatment == FFN and len(segment.calls) == 1 and unit.position == unit.last
        self.nesting.depth += 1
        try:
            output = segment.run(
                call,
                args,
                kwargs,
                leaves,
                kept_addresses=_weight_addresses(call) if alone else frozenset(),
                register_outputs=more,
                on_pack=self.ledger.packer(unit.record),
                copy_meanwhile=unit.treatment != FFN,
            )
        except BaseException:  # rule 5
            self.nesting.open.pop(unit.group, None)
            raise
        finally:
            self.nesting.depth -= 1
        if more and call.drops:
            self.nesting.open[unit.group] = weakref.ref(segment)  # rule 2
        else:
            self.nesting.open.pop(unit.group, None)
        return output

    def _generators(self, leaves: Leaves) -> list[torch.Generator]:
        if self.accelerator is None:
            return [torch.default_generator, *leaves.generators]
        devices = {tensor.device for tensor in leaves}
        return [*default_generators(self.accelerator, devices), *leaves.generators]

    # ------------------------------------------------------------------ keeping

    def _keep(
        self,
        unit: Unit,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str | None = None,
    ) -> Any:
        self.ledger.begin_kept_call(unit.record, args, kwargs)
        if reason is not None:
            self.ledger.keep_instead(unit.record, reason)
        store = self.store
        if store is not None:
            store.enter_block(unit.record.number, unit.record.name)
        pack = self._pack(unit) if reason is None else None
        hooks = self.ledger.moving_hooks(unit.record, pack) if pack else self.ledger.keeping_hooks(unit.record)
        output = self._with_hooks(hooks, original, module, args, kwargs)
        self._settle(unit)
        return output

    def _move(
        self,
        unit: Unit,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        pack = self._pack(unit)
        if pack is None:
            return original(module, *args, **kwargs)
        return self._with_hooks(self.ledger.moving_hooks(unit.record, pack), original, module, args, kwargs)

    def _pack(self, unit: Unit) -> Callable[[torch.Tensor], Packed] | None:
        """The store's hook for what a module that is not recomputed saves; None: it is not the store's."""
        store = self.store
        if store is None:
            return None
        if unit.treatment == MOVED or SAVED in unit.moves:
            return store.pack
        if unit.moves:
            return store.share
        wakes = unit.treatment == WAKES or unit.wakes == SAVED
        return store.pack_here if wakes and not self._others_pack() else None  # rule 23

    def _with_hooks(
        self,
        hooks: AbstractContextManager[Any] | None,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if hooks is None:
            return original(module, *args, **kwargs)
        before, outside = self.nesting.outside, packs_outside()
        if before is not None and outside is before[1]:
            outside = before[0]
        try:
            with hooks:
                self.nesting.outside = outside, packs_outside()
                return original(module, *args, **kwargs)
        finally:
            self.nesting.outside = before
            if self.store is not None:
                self.store.flush()

    def _keep_opaque(
        self,
        unit: Unit,
        kind: str,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.nesting.open.pop(unit.group, None)
        self.nesting.depth += 1
        try:
            return self._keep(unit, original, module, args, kwargs, f"it is given a {kind}, which it may change unseen")
        finally:
            self.nesting.depth -= 1


def _weight_addresses(call: Call) -> set[int]:
    assert call.roots is not None
    return {weight.data_ptr() for weight in call.roots[0].parameters() if type(weight) is nn.Parameter}
