"""Costs of the step at hand, from its shapes at first and from what steps took later, and the plan that they make."""

import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy
import torch
from torch import nn

from lowtide.auto.budget import within_pages
from lowtide.auto.lying import Lying
from lowtide.errors import ConfigError
from lowtide.families.row import Stack
from lowtide.measure.cards import Card, find_card
from lowtide.measure.device import measured_card
from lowtide.measure.forecast import forecast
from lowtide.measure.meta_copy import casting_as, on_meta, shapes_of
from lowtide.measure.meter import meter_of
from lowtide.measure.probe import Probed
from lowtide.measure.residents import block_gradients
from lowtide.plan.answer import Plan
from lowtide.plan.assignment import assignment_of, schedule_of
from lowtide.plan.costs import BlockKind, StepCosts
from lowtide.plan.narrow import narrow_plan
from lowtide.plan.predict_step import predict_schedule
from lowtide.plan.sampling import bytes_of, corrected, samples_of, sampling, with_bytes
from lowtide.plan.schedule import ATTENTION, KEPT, WHOLE, Schedule
from lowtide.plan.solve import fixed_plans, smallest_peak, solve
from lowtide.plan.trials import Trials
from lowtide.runtime.flatten import OpaqueArgument, flatten_call
from lowtide.runtime.host_memory import share_of_host_bytes
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.units import format_bytes

_CAUTION = 0.14
"""Of the room for activations, left free as long as nothing is measured: forecasts of peaks err by some percent."""
_MARGIN, _LEAST_MARGIN_BYTES = 0.04, 96 * 2**20
_LIKE_MARGIN, _LEAST_LIKE_MARGIN_BYTES = 0.01, 40 * 2**20
"""Left free for errors, and for pages that are partly in use: a share of the room for activations, and at least so
much. Less where plans like it have run."""
_PAGES_BYTES = 20 * 2**20
"""By which a plan may take more than when it ran; twice that is little at a limit."""
_STEP_DOWN = 0.1
"""By how much less the activations take after a step that ran out of memory."""
_MOST_SPARE, _MOST_SPARE_BYTES = 0.06, 512 * 2**20
"""The most that counts as reserved beyond what tensors take: a share of a budget, and so much in any case. Some may be
left over from before the step; weights in segments that do not expand leave 0.4 GiB of 4.7."""
_ON_CPU = "RTX 4090"  # there, figures of some card stand in until steps are measured


@dataclass
class Planner:
    """The costs of one model's step. rows: of its stacks. can_move: whether there is where to offload to.

    card: the device's figures, once they are asked for. spare_bytes: what PyTorch reserves beyond what tensors take,
    the most of all steps.
    ceiling_bytes: what a plan may take since a step ran out of memory; None: none has.
    """

    model: nn.Module
    rows: tuple[Stack, ...] | None
    device: torch.device
    budget_bytes: int
    min_bytes: int
    can_move: bool
    costs: StepCosts | None = None
    card: Card | None = None
    spare_bytes: int = 0
    ceiling_bytes: int | None = None
    _lying: Lying | None = None
    _now_bytes: int = 0
    _before_bytes: int = 0
    _shared_bytes: int = 0
    _error_bytes: int = 0
    _corrected: Schedule | None = None
    _relief_share: float | None = None  # the least that a step showed; None: none has
    _relief_bytes: int = 0  # of how many, at most
    _trials: Trials | None = None
    _seen: list["_Seen"] = field(default_factory=list)
    _untimed: int | None = None  # of those, how many came before treatments were timed; None: they have not been
    _updated: bool = False
    _gradients: Mapping[str, int] = field(default_factory=dict)  # of one block, by kind
    _begins_without: bool = False  # gradients, the step at hand
    _began_without: bool = False
    _adds_up: bool = False  # gradients of several backwards

    def forecast(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Costs of a step with these arguments of the model's forward, from their shapes.

        Raises ConfigError where the forward cannot be traced: says what to do instead.
        """
        bound = inspect.signature(self.model.forward).bind(*args, **kwargs)
        _check_not_sharded(self.model)
        _check_arguments(args, kwargs)
        if self._lying is None:
            self._lying = Lying(self.model, bound.arguments, meter_of(self.device))
            self._lying.updated = self._updated
        else:
            self._lying.look_at_weights()
        self.spare_bytes = max(self.spare_bytes, self._lying.reserved_bytes)
        self._now_bytes, self._begins_without = self._lying.now_bytes(), not self._lying.has_gradients()
        try:
            stacks = resolve(self.model, self.rows)
            with _random_states_kept():
                self.costs = self._traced(stacks, _named(bound), self._now_bytes)
        except ConfigError as error:
            text = f"auto cannot plan for this model: {str(error).rstrip('.')}. Choose a backend by name instead."
            raise ConfigError(text) from error
        self._shared_bytes = self.costs.resident_bytes - self._now_bytes
        self._gradients = block_gradients(self.model, stacks, self.costs.stacks)
        self.costs = self.costs.with_gradients(self._late_gradients)
        self._error_bytes, self._corrected, self._trials = 0, None, None
        self._relief_share, self._relief_bytes = None, 0
        self._untimed, self._seen = None, []

    def begin_step(self) -> None:
        """Before each further step that is planned or watched: see what lies on the device by now."""
        assert self._lying is not None
        self._before_bytes, self._now_bytes = self._now_bytes, self._lying.now_bytes()
        self._began_without, self._begins_without = self._begins_without, not self._lying.has_gradients()
        self._settle()

    def gradients_add_up(self) -> bool:
        """Before every step: whether gradients lie there for the first time. Plans may have counted on their room."""
        if self._adds_up or self._lying is None or not self._lying.has_gradients():
            return False
        self._adds_up = True
        return any(self.costs.gradient_bytes.values()) if self.costs is not None else False

    @property
    def _late_gradients(self) -> Mapping[str, int]:
        """Those whose room is free until backward makes them, of which can be sure who has seen an update, and no step
        that began with gradients."""
        sure = self._lying is not None and self._lying.updated and self._begins_without and not self._adds_up
        return self._gradients if sure else {}

    def note_update(self) -> None:
        """The optimizer has updated the model."""
        self._updated = True
        if self._lying is not None:
            self._lying.updated = True

    def plan(self, *, careful: bool = False, moving: bool = True, like: bool = False) -> Plan:
        """careful: leave some of the budget free, but less where nothing would fit. moving: whether anything may wait
        in CPU memory. like: whether such a plan has run.

        Raises ConfigError where nothing fits: says what would.
        """
        costs = self._known if careful else self._shown
        costs = costs if moving else replace(costs, link=None)
        if careful:
            try:
                return solve(costs, self._careful_bytes(costs))
            except ConfigError as error:
                told = "Raise vram_budget, or take a smaller batch or picture, fewer frames, a lower rank"
                raise ConfigError(f"{error}. {told}.") from error
        return solve(costs, self._most_like_bytes(costs) if like else self._most_bytes(costs))

    def fixed_plans(self) -> list[Plan]:
        """The fixed settings that fit; the quickest by what is known first."""
        spare_bytes = self._like_spare_bytes
        return fixed_plans(self._shown, self._left_bytes(self._shown, spare_bytes, _MARGIN, _LEAST_MARGIN_BYTES))

    def hoped_plans(self, beside: Schedule) -> Iterator[tuple[float, Plan]]:
        """What would be quickest if one of the treatments were as quick as it may well be by what steps told; and by
        which share it would be quicker then than ``beside``."""
        for costs in () if self._trials is None else self._trials.hoped(self._shown):
            try:
                plan = solve(costs, self._most_like_bytes(costs))
            except ConfigError:
                continue
            yield 1 - plan.prediction.step_ms / predict_schedule(costs, beside).step_ms, plan

    def narrow_plan(self) -> Plan | None:
        """A plan like those that were tried, by which less than usual is brought back ahead; None: there is none."""
        return narrow_plan(self._shown, self._most_like_bytes(self._shown))

    def as_it_ran(self, plan: Plan) -> Plan:
        """The plan of the last step, with what is known of it by now."""
        costs = replace(self._known, resident_bytes=self._lying_bytes(self._error_bytes), in_flight_share=1.0)
        prediction = predict_schedule(costs, plan.schedule)
        return replace(plan, prediction=prediction, source=costs.source, foreseen=plan.foreseen or plan.prediction)

    def sampling(self) -> Schedule | None:
        """A step that measures treatments side by side; None where it would not fit."""
        made = sampling(self._known, self._careful_bytes(self._known))
        return None if made is None else schedule_of(made)

    def learn_times(self, schedule: Schedule, probed: Sequence[Probed]) -> None:
        """Correct times by steps that ran under ``sampling``: by the median of each block's."""
        if not probed:
            return
        blocks = set.intersection(*(set(one.times) for one in probed))
        times = {
            block: (
                median(one.times[block].forward_ms for one in probed),
                median(one.times[block].backward_ms for one in probed),
            )
            for block in blocks
        }
        samples = list(samples_of(self._known, assignment_of(self._known, schedule), times))
        other_ms = max(0.0, median(one.step_ms for one in probed) - sum(map(sum, times.values())))
        self.costs = corrected(self._known, samples, other_ms, self._known.link)
        self._untimed = len(self._seen)

    def learn_bytes(self, schedule: Schedule, probed: Probed | None) -> None:
        """Correct bytes by a step that ran under ``sampling``."""
        if probed is None or not probed.memory:
            return
        memory = {block: (one.kept_bytes, one.working_bytes) for block, one in probed.memory.items()}
        costs = self._as_the_step_began(self._known)
        seen = list(bytes_of(costs, assignment_of(costs, schedule), memory))
        self.costs = with_bytes(self._known, seen)

    def learn_peak(self, schedule: Schedule, probed: Probed | None) -> None:
        """See by how much the predicted peak of the last step was wrong, at most of the steps under one schedule (with
        accumulated gradients some need more than others), and what was reserved beyond it.

        Where copies in flight were to need less room than all of them, what was seen says how much less (attention
        sides may need as much as feed-forward sides): the least of all steps is believed, of as many bytes. Otherwise,
        less than predicted: copies were not in flight where backward needed the most, which may hold for as many bytes
        of other schedules, and for no more. More: what is left of the error may others need, too.
        """
        if probed is None or probed.peak_bytes is None or probed.reserved_bytes is None:
            return
        lying_bytes = max(0, self._before_bytes + self._shared_bytes)
        costs = self._as_the_step_began(replace(self._known, resident_bytes=lying_bytes, in_flight_share=1.0))
        seen_share, seen_bytes = _seen_relief(costs, schedule, probed.peak_bytes)
        if seen_bytes:
            self._relief_share = min(seen_share, 1.0 if self._relief_share is None else self._relief_share)
            self._relief_bytes = max(seen_bytes, self._relief_bytes)
            relief = self._relief_share, int(self._relief_share * self._relief_bytes)
            self.costs, costs = self._known.with_relief(*relief), costs.with_relief(*relief)
        highest = predict_schedule(costs, schedule).highest
        error_bytes = probed.peak_bytes - highest.peak_bytes
        self._error_bytes = max(error_bytes, self._error_bytes) if schedule == self._corrected else error_bytes
        self._corrected = schedule
        if highest.in_flight_bytes and (not seen_bytes or self._relief_share == 1.0):
            share = min(1.0, max(0.0, 1 + self._error_bytes / highest.in_flight_bytes))
            self.costs = replace(self._known, in_flight_share=share, in_flight_known_bytes=highest.in_flight_bytes)
        most_bytes = max(_MOST_SPARE_BYTES, int(_MOST_SPARE * self.budget_bytes))
        spare_bytes = min(most_bytes, probed.reserved_bytes - probed.peak_bytes)
        self.spare_bytes = max(self.spare_bytes, spare_bytes)
        activation_bytes = probed.peak_bytes - lying_bytes
        self._seen.append(_Seen(schedule, self._began_without, probed.peak_bytes, activation_bytes, spare_bytes))
        self._settle()

    def _as_the_step_began(self, costs: StepCosts) -> StepCosts:
        """The costs of the last step: with or without the gradients that lay there at its beginning."""
        return costs.with_gradients(self._gradients if self._began_without else {})

    def _settle(self) -> None:
        """What lies there throughout further steps."""
        costs = replace(self._known, resident_bytes=self._lying_bytes(max(0, self._error_bytes)))
        self.costs = costs.with_gradients(self._late_gradients)

    def _lying_bytes(self, error_bytes: int) -> int:
        assert self._lying is not None
        return max(0, self._now_bytes + self._lying.to_come_bytes() + self._shared_bytes + error_bytes)

    def learn_step(self, plan: Plan, step_ms: float, noise_ms: float = 0.0) -> None:
        """Correct times by what whole steps took, this one and those before it. What nothing explains of this one is
        outside of blocks. noise_ms: by how much it may well be off."""
        self._trials = self._trials or Trials(self._known)
        self._trials.add(assignment_of(self._trials.timed, plan.schedule), step_ms, noise_ms)
        costs = self._trials.applied(self._known)
        error_ms = step_ms - predict_schedule(costs, plan.schedule).step_ms
        self.costs = replace(costs, other_ms=max(0.0, costs.other_ms + error_ms))

    @property
    def _known(self) -> StepCosts:
        assert self.costs is not None
        return self.costs

    @property
    def _shown(self) -> StepCosts:
        """The same, where copies in flight are spared no room but what a step has shown: forecasts of that err by all
        of it, and little is left free now."""
        return self._known if self._relief_share is not None else self._known.with_relief(0.0)

    def ran_out(self) -> bool:
        """Whether memory has run out since this was asked the last time: in a step, or wherever."""
        return self._lying is not None and self._lying.ran_out()

    def note_failure(self, schedule: Schedule) -> bool:
        """A step under this schedule ran out of memory: what is planned from now on takes less than it was to take.
        Returns whether anything does."""
        costs = self._known
        try:
            peak_bytes = predict_schedule(costs, schedule).peak_bytes
        except ConfigError:  # of a forward that was refused, and not of the one that ran
            return False
        less_bytes = peak_bytes - int(_STEP_DOWN * max(0, peak_bytes - costs.resident_bytes))
        self.ceiling_bytes = less_bytes if self.ceiling_bytes is None else min(less_bytes, self.ceiling_bytes)
        self.ran_out()  # it has been told
        return smallest_peak(costs).peak_bytes < peak_bytes

    def _careful_bytes(self, costs: StepCosts) -> int:
        """What a plan may take that is the only one: enough for the smallest peak, if the budget is."""
        allowed_bytes = within_pages(self.device, self.budget_bytes)
        return min(allowed_bytes, max(self._most_bytes(costs, _CAUTION), smallest_peak(costs).peak_bytes))

    def _most_bytes(self, costs: StepCosts, share: float = _MARGIN) -> int:
        """What a plan may take. share: of the room for activations, that is left free."""
        return self._left_bytes(costs, self.spare_bytes, share, _LEAST_MARGIN_BYTES)

    def _most_like_bytes(self, costs: StepCosts) -> int:
        """What a plan may take that is like those that were tried, and takes as much less than predicted as all those
        did."""
        margin = _LIKE_MARGIN, _LEAST_LIKE_MARGIN_BYTES
        return self._left_bytes(costs, self._like_spare_bytes, *margin, self._less_bytes - self._more_bytes)

    @property
    def _less_bytes(self) -> int:
        """How much less than predicted, by what is known now, activations took under all plans that were tried. What
        copies in flight may have been spared under these is no room for others."""
        costs = self._known.with_relief(1.0)
        less = (
            self._activation_bytes(costs, seen.schedule, seen.began_without) - seen.activation_bytes
            for seen in self._tried
        )
        return max(0, min(less, default=0))

    @property
    def _more_bytes(self) -> int:
        """How much more than predicted, by what is known now, activations took under one of these plans, beyond what
        is laid to the residents for the last of them."""
        costs = self._shown
        more = (
            seen.activation_bytes - self._activation_bytes(costs, seen.schedule, seen.began_without)
            for seen in self._tried
        )
        return max(0, max(more, default=0) - max(0, self._error_bytes))

    def _activation_bytes(self, costs: StepCosts, schedule: Schedule, begins_without: bool) -> int:
        """Predicted. begins_without: gradients are not there when the step begins."""
        gradients = self._gradients if begins_without else {}
        costs = replace(costs.with_gradients(gradients), resident_bytes=0)
        return predict_schedule(costs, schedule).highest.peak_bytes

    def fits(self, plan: Plan) -> bool:
        """Whether a plan does that was made before: more may lie there by now. As measured, where it has run: it takes
        hardly more than it did then, or leaves room for what was reserved beyond."""
        begins_without = bool(self._late_gradients)
        ran = [one for one in self._seen if (one.schedule, one.began_without) == (plan.schedule, begins_without)]
        most_bytes = within_pages(self.device, self.budget_bytes)
        if self.ceiling_bytes is not None:
            most_bytes = min(most_bytes, self.ceiling_bytes)
        if not ran:
            activation_bytes = self._activation_bytes(self._shown, plan.schedule, begins_without)
            return self._lying_bytes(0) + activation_bytes <= most_bytes
        peak_bytes = self._lying_bytes(0) + max(one.activation_bytes for one in ran)
        more_bytes = _PAGES_BYTES if self.device.type == "cuda" else 0
        held_bytes, spare_bytes = max(one.peak_bytes for one in ran), max(one.spare_bytes for one in ran)
        return peak_bytes <= min(most_bytes, max(held_bytes + more_bytes, most_bytes - spare_bytes))

    def near_the_limit(self, reserved_bytes: int) -> bool:
        """Whether a little more in pieces that fit nothing would exceed the budget. reserved_bytes: 0: not known."""
        return reserved_bytes > max(0, within_pages(self.device, self.budget_bytes) - 2 * _PAGES_BYTES)

    @property
    def _tried(self) -> Sequence["_Seen"]:
        """Steps under plans that were made from measured times."""
        return self._seen[self._untimed :] if self._untimed is not None else ()

    @property
    def tried_spare_bytes(self) -> int | None:
        """What was reserved beyond tensors in those alone, the most; None: there is none."""
        return max((seen.spare_bytes for seen in self._tried), default=None)

    @property
    def _like_spare_bytes(self) -> int:
        tried_bytes = self.tried_spare_bytes
        return self.spare_bytes if tried_bytes is None else tried_bytes

    def _left_bytes(
        self, costs: StepCosts, spare_bytes: int, share: float, least_bytes: int, less_bytes: int = 0
    ) -> int:
        """less_bytes: how much less than predicted will be taken."""
        room_bytes = max(0, self.budget_bytes - costs.resident_bytes)
        pages_bytes = least_bytes if self.device.type == "cuda" else 0
        margin_bytes = max(pages_bytes, int(share * room_bytes)) - less_bytes
        most_bytes = min(self.budget_bytes - spare_bytes - margin_bytes, within_pages(self.device, self.budget_bytes))
        return most_bytes if self.ceiling_bytes is None else min(most_bytes, self.ceiling_bytes)

    def _traced(self, stacks: Sequence[ResolvedStack], inputs: Mapping[str, Any], resident_bytes: int) -> StepCosts:
        self.card = self.card or _card(self.device)
        shadow = on_meta(self.model)
        with casting_as(self.device):
            costs = forecast(
                shadow,
                resolve(shadow, self.rows),
                shapes_of(inputs),
                self.card,
                resident_bytes,
                host_limit_bytes=share_of_host_bytes(),
                min_bytes=self.min_bytes,
            )
        if not any(kind.forward_ms for kind in costs.kinds.values()):
            raise ConfigError("its forward calls none of its blocks (has somebody put another forward in its place?)")
        if any(block._compiled_call_impl is not None for stack in stacks for _, block in stack.blocks):
            costs = replace(costs, kinds={name: _uncut(kind) for name, kind in costs.kinds.items()})
        return costs if self.can_move else replace(costs, link=None)


@dataclass(frozen=True)
class _Seen:
    """A step under a schedule. began_without: gradients. activation_bytes: its peak above what lay there throughout.
    spare_bytes: what was reserved beyond that peak."""

    schedule: Schedule
    began_without: bool
    peak_bytes: int
    activation_bytes: int
    spare_bytes: int


def _seen_relief(costs: StepCosts, schedule: Schedule, peak_bytes: int) -> tuple[float, int]:
    """What copies in flight may be spared where backward needs the most, in bytes, and the share of it by a step's
    peak."""
    none, all_of_it = (
        predict_schedule(each, schedule).highest.peak_bytes for each in (costs.with_relief(0.0), costs.with_relief(1.0))
    )
    return min(1.0, max(0.0, (none - peak_bytes) / max(1, none - all_of_it))), none - all_of_it


def in_short(plan: Plan, budget_bytes: int) -> str:
    """The plan in a line: how many blocks have which treatment, and its peak and time by prediction. budget_bytes: all
    of it, of which some is left free."""
    made = plan.prediction
    peak, room, budget = map(format_bytes, (made.peak_bytes, plan.budget_bytes, budget_bytes))
    return f"{plan.schedule.in_short}; peak {peak} (room for tensors: {room} of {budget}), {made.step_ms:.0f} ms"


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """What the traced forward draws is not taken from the run: torch's numbers on the CPU, Python's and numpy's."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _check_not_sharded(model: nn.Module) -> None:
    """Raises ConfigError where ranks fetch weights together: each would plan for itself, and wait for the others in a
    block that these do not recompute."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever shards has imported it
    if fsdp is not None and any(
        isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel) for module in model.modules()
    ):
        raise ConfigError(
            "auto cannot plan for a model that FSDP shards: ranks gather weights together, and each would choose a "
            "schedule of its own. Give all of them one saved plan (attach(schedule=…)), or choose a backend by name."
        )


def _check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that a trace would change: a cache, an iterator, an object with a state."""
    try:
        flatten_call(args, dict(kwargs))
    except OpaqueArgument as error:
        raise ConfigError(
            f"auto cannot plan for this model: its forward is given a {error}, which tracing it might change. Choose a "
            "backend by name instead."
        ) from error


def _uncut(kind: BlockKind) -> BlockKind:
    """Without what reaches into a block: compiled code would be cut there, and compiled anew for each treatment. Its
    backward reads all that it saved at once."""
    whole = (cost for cost in kind.treatments if cost.treatment in (KEPT, WHOLE) and ATTENTION not in cost.moves)
    return replace(kind, treatments=tuple(replace(cost, relief_bytes=0) for cost in whole))


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those of a ``**kwargs`` among them. Raises ConfigError for a ``*args`` that is in use."""
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise ConfigError(f"its forward is given values without a name (*{name})")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _card(device: torch.device) -> Card:
    """The device's own figures, measured; on the CPU those of some card."""
    return find_card(_ON_CPU) if device.type == "cpu" else measured_card(device)
