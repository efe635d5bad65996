"""The handle of ``backend="auto"``: it looks at each step before it begins, and changes the schedule between steps.

Every step is a training step with the gradients of a plain run. The first ones run under

1. a forecast's plan that leaves room for its errors; afterwards the peak is known (and optimizer states exist);
2. a schedule that has each treatment on some blocks, twice, of which the second is timed;
3. the plan from measured times, the plan from what that one then took, and the same two of plans that move nothing, a
   few steps each. What was quickest stays.

A forward with more elements than any before begins anew, from what is known by then; so does one after a step that ran
out of memory, with more room to spare. Where the plain run fits, it stays with that, and measures nothing but its peak.
"""

import functools
import inspect
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.auto.budget import Limit, budget_bytes
from lowtide.auto.planner import Planner, in_short
from lowtide.auto.size import Size, Sizes
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError, LowtideError
from lowtide.handle import NOT_CALLED, Attachment, Handle, attach_as, rows_for
from lowtide.measure.meter import meter_of
from lowtide.measure.probe import Probed, StepProbe
from lowtide.plan.schedule import Schedule, keep_all
from lowtide.plan.solve import Plan
from lowtide.runtime.in_turn import InTurn
from lowtide.runtime.link import can_offload
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.runtime.swap import Routes, intercept, release
from lowtide.runtime.tracer import transformed

_log = logging.getLogger("lowtide")

Steps = Generator[bool, Probed | None]
"""What is left of measuring: at each ``yield`` a step runs, and what it showed comes back. What is yielded says whether
the memory of each block is to be seen."""

_SETTLED = "from now on"
_TRIED = {True: "tried for some steps, from measured times", False: "tried for some steps, with nothing moving"}
_TIMED = 3
"""Steps of a candidate that count. The first under any schedule counts bytes, which takes time of its own."""
_WORTH = 0.01
"""Of the time of a step, that copies have to save to be worth it: what else uses the link or the host may change."""


class AutoHandle(Attachment):
    """What ``attach(backend="auto")`` returns: a ``Handle``, and ``plan`` is the one that runs, once there is one."""

    def __init__(self, model: nn.Module, config: CheckpointConfig, family: str | None = None) -> None:
        budget_bytes(config.vram_budget)  # raises now what the first step would raise
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
        self._updated = False
        self._on_update = register_optimizer_step_post_hook(_Updates(weakref.ref(self)))
        self._steps: Steps | None = None
        self._inside = False
        self.active = True
        intercept([(type(self._root).__name__, self._root)], self, forward=True)

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
        return self.plan is not None and self._steps is None

    @property
    def budget_bytes(self) -> int | None:
        """What PyTorch may reserve; None before the first step, where the budget is what is free then."""
        return self._planner.budget_bytes if self._planner is not None else None

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
        largest = (max(size[0], self._largest[0]), max(size[1], self._largest[1]))
        if largest != self._largest:
            self._largest = (0, 0)  # until it is planned for: where nothing fits, the next forward is to say so, too
            self._go_on(self._begin(args, kwargs), None)
            self._largest = largest
        elif size != largest:
            self._seen = seen  # it fits where the largest one does, and its times would mislead
        elif self._steps is not None and self._planner is not None:
            if seen is None and self._planner.ran_out():
                self._go_on(self._begin(args, kwargs), None)
            else:
                self._planner.begin_step()
                self._go_on(self._steps, seen)

    def _go_on(self, steps: Steps, seen: Probed | None) -> None:
        self._steps = None
        try:
            each = steps.send(seen)
        except StopIteration:
            return
        except LowtideError:
            self._largest = (0, 0)  # the next forward is planned for anew, or says the same
            raise
        self._steps = steps
        meter, passing = meter_of(self._device), self._handle.passing_bytes
        self._probe = StepProbe(self.stacks, self._device, meter, each, self._watching, passing).start()

    def _stop_probe(self) -> Probed | None:
        """What the last step of the largest size showed."""
        probe, seen = self._probe, self._seen
        self._probe = self._seen = None
        return seen if probe is None else probe.stop()

    @functools.cached_property
    def _device(self) -> torch.device:
        return next(self._root.parameters()).device

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
        return self._measuring(planner)

    def _new_planner(self) -> Planner:
        can_move = can_offload(self._device)
        size_bytes = budget_bytes(self.config.vram_budget)
        return Planner(self._root, self._rows, self._device, size_bytes, self.config.offload_min_bytes, can_move)

    def _measuring(self, planner: Planner) -> Steps:
        plan = self._take(planner.plan(careful=True), "to begin with, from shapes")
        planner.learn_peak(plan.schedule, (yield False))
        sample = planner.sampling()
        if sample is None or plan.leaves_off:
            plan = self._take(self._candidate(planner) or plan, _SETTLED)
        if sample is None or plan.leaves_off:
            return
        self._change(sample)
        _log.info("auto: two steps measure each treatment on some blocks")
        seen = yield True
        planner.learn_bytes(sample, seen)
        planner.learn_peak(sample, seen)
        planner.learn_times(sample, (yield False))
        tried: list[tuple[float, Plan]] = []
        for moving, like in itertools.product((True, False), (False, True)):
            made = self._candidate(planner, moving, like)
            if made is not None and all(made.schedule != other.schedule for _, other in tried):
                step_ms = yield from self._try(planner, self._take(made, _TRIED[moving]))
                tried.append((step_ms, planner.as_it_ran(made)))
        self._take(min(tried, key=_quickest, default=(math.inf, plan))[1], _SETTLED)

    @staticmethod
    def _candidate(planner: Planner, moving: bool = True, like: bool = False) -> Plan | None:
        """None where nothing seems to fit: without offload, or because the last step took more than was expected."""
        try:
            return planner.plan(moving=moving, like=like)
        except ConfigError:
            return None

    @staticmethod
    def _try(planner: Planner, plan: Plan) -> Generator[bool, Probed | None, float]:
        """Milliseconds of the quickest of a few steps under a plan that is attached; infinite if none was complete."""
        planner.learn_peak(plan.schedule, (yield False))
        times_ms = []
        for _ in range(_TIMED):
            seen = yield False
            planner.learn_peak(plan.schedule, seen)
            times_ms += [seen.step_ms] if seen is not None else []
        if times_ms:
            planner.learn_step(plan, min(times_ms))
        return min(times_ms, default=math.inf)

    def _take(self, plan: Plan, why: str) -> Plan:
        """why: it is taken, for people."""
        self.plan = plan
        self._change(plan.schedule)
        if why == _SETTLED and not plan.schedule.moves_anything:
            self._in_turn.trim()
        _log.info("auto: %s: %s", why, in_short(plan))
        return plan

    def _change(self, schedule: Schedule) -> None:
        if schedule == self._running:
            return
        self._handle.detach()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # pieces that fit the steps before fit none of the next
        self._handle = self._attached(schedule)

    def _attached(self, schedule: Schedule) -> Handle:
        self._running = schedule
        return attach_as(self._root, self._memory, schedule, self._family, self._in_turn)


@dataclass(frozen=True)
class _Updates:
    """torch's hook after every update of any optimizer. It must not keep a model alive, nor be removed as it runs."""

    handle: "weakref.ref[AutoHandle]"

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        handle = self.handle()
        if handle is not None:
            handle.note_update(optimizer)


def _quickest(tried: tuple[float, Plan]) -> float:
    step_ms, plan = tried
    return step_ms * (1 + _WORTH * plan.schedule.moves_anything)


def _unwrapped(model: nn.Module) -> nn.Module:
    """What stands in wrappers that have nothing but it, and take what it takes (DDP, PEFT, torch.compile)."""
    children = list(model.children())
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    takes_anything = inspect.Parameter.VAR_POSITIONAL in kinds and len(kinds) == 2
    return _unwrapped(children[0]) if len(children) == 1 and takes_anything else model
