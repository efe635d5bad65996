"""The handle of ``backend="auto"``: it looks at each step before it begins, and changes the schedule between steps.

What runs in the first steps, ``measuring`` says. A forward with more elements than any before begins anew, from what is
known by then; so does one after a step that ran out of memory, with more room to spare.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.auto.budget import Limit, budget_bytes
from lowtide.auto.measuring import Steps, measuring
from lowtide.auto.planner import Planner
from lowtide.auto.size import Size, Sizes
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.handle import NOT_CALLED, Attachment, Handle, attach_as, rows_for
from lowtide.measure.meter import meter_of
from lowtide.measure.probe import Probed, StepProbe
from lowtide.plan.answer import Plan
from lowtide.plan.schedule import Schedule, keep_all
from lowtide.runtime.in_turn import InTurn
from lowtide.runtime.link import can_offload
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.runtime.swap import Routes, intercept, release
from lowtide.runtime.transforms import transformed

_log = logging.getLogger("lowtide")

_MANY = 4
"""Forwards smaller than the largest, after which they run under the last plan until the next one that is measured."""


class AutoHandle(Attachment):
    """What ``attach(backend="auto")`` returns: a ``Handle`` with the ``plan`` that was taken last. It is what runs, but
    in steps that measure treatments side by side (``schedule`` is what runs in any case)."""

    def __init__(self, model: nn.Module, config: CheckpointConfig, family: str | None = None) -> None:
        budget_bytes(config.vram_budget)  # raises now what the first step would raise
        if any(weight.is_meta for weight in model.parameters()):
            raise ConfigError(
                "auto measures steps, and this model is on the meta device: `lowtide plan` works from shapes"
            )
        self.config = config
        self.plan: Plan | None = None
        root, rows = rows_for(model, family)
        self._root = root if rows is not None else _unwrapped(root)
        self._memory = CheckpointConfig(
            gradient_checkpointing=False,
            offload_pin_memory_max_buckets=config.offload_pin_memory_max_buckets,
            offload_min_bytes=config.offload_min_bytes,
        )
        self._family = family
        self._in_turn, self._watching = InTurn(config.offload_pin_memory_max_buckets), Routes()
        stacks = resolve(self._root, rows)
        self._handle = self._attached(Schedule({stack.name: keep_all(len(stack.blocks)) for stack in stacks}))
        self._rows = rows
        self._planner: Planner | None = None
        self._limit: Limit | None = None
        self._probe: StepProbe | None = None
        self._seen: Probed | None = None
        self._sizes = Sizes(self._root)
        self._largest: Size = (0, 0)
        self._failed: Size = (0, 0)
        self._updated = False
        self._on_update = register_optimizer_step_post_hook(_Updates(weakref.ref(self)))
        self._steps: Steps | None = None
        self._smaller = 0  # forwards since one that was measured
        self._inside = False
        self.active = True
        try:
            intercept([(type(self._root).__name__, self._root)], self, forward=True)
        except ConfigError:  # it is a block of another model that is attached
            self.detach()
            raise

    # ------------------------------------------------------------------ as Handle

    @property
    def stacks(self) -> list[ResolvedStack]:
        return self._handle.stacks

    @property
    def schedule(self) -> Schedule:
        """What runs now."""
        return self._handle.schedule

    @property
    def settled(self) -> bool:
        """Whether nothing is measured any more: the schedule stays, until a larger forward than any before comes."""
        return self.plan is not None and self._steps is None and self._largest != (0, 0)

    @property
    def budget_bytes(self) -> int | None:
        """What PyTorch may reserve; None before the first step, where the budget is what is free then."""
        return self._planner.budget_bytes if self._planner is not None else None

    def __repr__(self) -> str:
        state = "" if self.settled else "; not settled yet"
        return f"<{type(self).__name__}: {self.schedule.in_short}{state if self.active else '; detached'}>"

    def receipt(self) -> Receipt:
        """What ran in the last step. Valid once its backward is done."""
        receipt = self._handle.receipt()
        if self.plan is None and any(block.reason != NOT_CALLED for block in receipt.blocks):
            return replace(receipt, warnings=(*receipt.warnings, self._unseen()))
        return receipt

    def _unseen(self) -> str:
        return (
            f"auto plans when {type(self._root).__name__} is called, and only its blocks have been: nothing is "
            "recomputed and nothing moves. Call the model itself, or choose a backend by name"
        )

    def detach(self) -> None:
        """Restore the model exactly. Graphs that are still alive can be run backward."""
        if not self.active:
            return
        self.active = False
        self._on_update.remove()
        release([self._root], self)
        self._stop_probe()
        self._handle.detach()
        self._release()
        self._in_turn.close()
        if self._limit is not None:
            self._limit.lift()

    # ------------------------------------------------------------------ calls of the model

    def run(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The model's call, after the schedule of the step has been seen to."""
        if self._inside or not self._is_step():
            return original(module, *args, **kwargs)
        self._inside = True  # its forward comes through, too
        try:
            self._before_step(args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self._inside = False

    run_eagerly = run

    def _is_step(self) -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        return self.active and torch.is_grad_enabled() and not in_backward and not transformed()

    def _before_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen, size = self._stop_probe(), self._sizes.of(args, kwargs)
        if self._planner is not None and self._planner.ran_out():
            self.note_out_of_memory()
        why = self._why_anew()
        if why is not None:
            self._largest = (0, 0)
        largest = (max(size[0], self._largest[0]), max(size[1], self._largest[1]))
        if largest != self._largest:
            if self._planner is not None and any(now > then for now, then in zip(largest, self._failed, strict=True)):
                self._planner.ceiling_bytes = None  # a smaller step's says nothing of this one
            if self.plan is not None:
                larger = "after an error" if self._largest == (0, 0) else "for a larger forward than any before"
                _log.info("auto: plans anew, %s", why or larger)
            self._largest = (0, 0)  # until it is planned for: where nothing fits, the next forward is to say so, too
            self._go_on(self._begin(args, kwargs), None)
            self._largest = largest
        elif size[0] != largest[0]:
            self._seen = seen  # it fits where the largest one does, and its times would mislead
            self._smaller += 1
            if self._smaller >= _MANY and self._steps is not None and self.plan is not None:
                self._attach_under(self.plan.schedule)  # what is measured next may be slow, and is not now
        elif self._steps is not None and self._planner is not None:
            self._planner.begin_step()
            self._go_on(self._steps, seen)

    def _why_anew(self) -> str | None:
        """Why the plan does not hold for this step, however large it is."""
        if self._planner is not None and self._planner.gradients_add_up():
            return "since gradients add up"
        if self._sizes.parts_changed and self._blocks_changed():
            return "since blocks have come or gone"
        return None

    def _blocks_changed(self) -> bool:
        self._sizes.parts_changed = False
        try:
            stacks = resolve(self._root, self._rows)
        except ConfigError:
            return True  # planning says so
        depths = {name: stack.depth for name, stack in self.schedule.stacks.items()}
        return depths != {stack.name: len(stack.blocks) for stack in stacks}

    def _go_on(self, steps: Steps, seen: Probed | None) -> None:
        self._steps, self._smaller = None, 0
        try:
            each = steps.send(seen)
            self._steps = steps
            self._attach_under(self._measured)
        except StopIteration:
            return
        except BaseException:  # an interrupt, too: half of a change may be done
            self._largest = (0, 0)  # the next forward is planned for anew, or says the same
            raise
        if not self.active:  # detached by what was traced
            self._steps = None
            return
        meter, passing = meter_of(self._device), self._handle.passing_bytes
        self._probe = StepProbe(self.stacks, self._device, meter, each, self._watching, passing)
        self._probe.start()

    def _stop_probe(self) -> Probed | None:
        """What the last step of the largest size showed."""
        seen, self._seen = self._seen, None
        if self._probe is not None:
            seen = self._probe.stop()
            self._probe = None  # not before: an interrupted stop is made up for by the next one
        return seen

    @functools.cached_property
    def _device(self) -> torch.device:
        return next(self._root.parameters()).device

    def note_out_of_memory(self) -> bool:
        """A step ran out of memory: the next forward is planned anew, for less. For those who catch the error and
        repeat the step. On a CUDA device it is noticed without. Returns whether there is a schedule that takes less."""
        if self._planner is None or self._planner.costs is None or self._running is None:
            return False
        takes_less = self._planner.note_failure(self._running)
        self._failed = self._largest if self._largest != (0, 0) else self._failed
        self._largest = (0, 0)
        return takes_less

    # ------------------------------------------------------------------ the first steps

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """After each update: the states of the model's optimizer are there from the first one on."""
        if self._updated:
            return
        own = {id(weight) for weight in self._root.parameters()}
        if any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
            self._updated = True
            if self._planner is not None:
                self._planner.note_update()

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps:
        planner = self._planner = self._planner or self._new_planner()
        planner.forecast(args, kwargs)
        if self._limit is None:
            self._limit = Limit(self._device, planner.budget_bytes)
        return measuring(planner, self)

    def _new_planner(self) -> Planner:
        can_move = can_offload(self._device)
        size_bytes = budget_bytes(self.config.vram_budget)
        planner = Planner(self._root, self._rows, self._device, size_bytes, self.config.offload_min_bytes, can_move)
        if self._updated:  # before the first forward
            planner.note_update()
        return planner

    def take(self, plan: Plan, settled: bool) -> None:
        """For ``measuring``."""
        self.plan = plan
        self.run_under(plan.schedule)
        if settled and not plan.schedule.moves_anything:
            self._in_turn.trim()

    def run_under(self, schedule: Schedule) -> None:
        """For ``measuring``."""
        self._measured = schedule
        self._attach_under(schedule)

    def _attach_under(self, schedule: Schedule) -> None:
        if schedule == self._running or not self.active:
            return
        self._running = None  # whatever interrupts this, the next forward attaches again
        self._handle.detach()
        self._release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # pieces that fit the steps before fit none of the next
        self._handle = self._attached(schedule)

    def _release(self) -> None:
        """What an interrupt may have left attached to a handle that nobody has."""
        release(self._root.modules(), self._in_turn.routes)

    def _attached(self, schedule: Schedule) -> Handle:
        handle = attach_as(self._root, self._memory, schedule, self._family, self._in_turn)
        self._running = schedule
        return handle


@dataclass(frozen=True)
class _Updates:
    """torch's hook after every update of any optimizer. It must not keep a model alive, nor be removed as it runs."""

    handle: "weakref.ref[AutoHandle]"

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        handle = self.handle()
        if handle is not None:
            handle.note_update(optimizer)


def _unwrapped(model: nn.Module) -> nn.Module:
    """What stands in wrappers that have nothing but it, and take what it takes (DDP, PEFT, torch.compile)."""
    children = list(model.children())
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    takes_anything = inspect.Parameter.VAR_POSITIONAL in kinds and len(kinds) == 2
    return _unwrapped(children[0]) if len(children) == 1 and takes_anything else model
