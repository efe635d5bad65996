"""``lowtide plan``: the quickest schedule for a model, its inputs and a budget, from shapes alone."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.measure.adapter import add_lora
from lowtide.measure.allowed import allowed_sizes, check_sizes
from lowtide.measure.build import Target, config_of, open_target
from lowtide.measure.cards import Card
from lowtide.measure.cast_weights import with_casts
from lowtide.measure.casting import Casting
from lowtide.measure.fits import Asked, Fit, what_fits
from lowtide.measure.forecast import forecast
from lowtide.measure.hints import Need, hints
from lowtide.measure.inputs import namespace
from lowtide.measure.residents import (
    ADAMW,
    BFLOAT16_BYTES,
    FLOAT32_BYTES,
    Residents,
    block_gradients,
    residents,
    state_bytes,
    update_bytes,
)
from lowtide.plan.answer import Plan
from lowtide.plan.costs import StepCosts
from lowtide.plan.explain import as_dict, of_few_tokens, prediction_dict
from lowtide.plan.solve import smallest_peak, solve
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.units import format_bytes


@dataclass(frozen=True)
class Wish:
    """What is to be trained, and in how much memory.

    target: a family's name or a model's folder. sizes: of the inputs, by the names of the family's row. rank: of a
    LoRA; None: all weights are trained. budget_bytes: what PyTorch may reserve. host_limit_bytes: CPU memory for what
    moves; None: no limit. optimizer: one of ``residents.STATE_BYTES``. ema: whether a mean of the trained weights lies
    on the device. accumulation: backwards before an update, which clears gradients: with one, they are not there before
    backward makes them. autocast: what is trained is in float32, and computed under bf16 autocast; else all is in bf16.
    """

    target: str
    budget_bytes: int
    card: Card
    sizes: Mapping[str, int] = field(default_factory=dict)
    rank: int | None = 16
    host_limit_bytes: int | None = None
    optimizer: str = ADAMW
    ema: bool = False
    accumulation: int = 1
    autocast: bool = True

    @property
    def trained_bytes(self) -> int:
        """Of a weight that is trained."""
        return FLOAT32_BYTES if self.autocast else BFLOAT16_BYTES

    @property
    def precision(self) -> str:
        """For people."""
        return "bf16 autocast" if self.autocast else "bf16"


@dataclass(frozen=True)
class Planned:
    """plan: None where nothing fits; refusal says so then. sizes: all of the inputs. late_gradients_bytes: of the
    residents, what is not there before backward makes it. update_bytes: what an update takes beside them.

    tokens: the most that a block's attention is asked for; 0: unknown.
    without_limit: the plan with no limit on CPU memory, where it needs more than the limit, and is quicker or alone
    fits; None: the limit does not bind.
    """

    wish: Wish
    label: str
    sizes: Mapping[str, int]
    parameters: int
    trained: int
    residents: Residents
    late_gradients_bytes: int
    update_bytes: int
    smallest_peak_bytes: int
    plan: Plan | None
    refusal: str | None
    fits: tuple[Fit, ...]
    without_limit: Plan | None = None
    tokens: int = 0

    @property
    def hints(self) -> tuple[str, ...]:
        """What can help where nothing fits."""
        return () if self.plan is not None else tuple(hints(self._need()))

    def _need(self) -> Need:
        wish = self.wish
        return Need(
            wish.budget_bytes,
            self.smallest_peak_bytes,
            self.residents,
            self.trained,
            wish.optimizer,
            wish.rank is None,
            self.without_limit is not None,
            self.update_bytes,
            wish.accumulation,
            wish.card,
        )

    @property
    def trained_text(self) -> str:
        """What is trained, for people: ``LoRA 16``."""
        return "all weights" if self.wish.rank is None else f"LoRA {self.wish.rank}"

    @property
    def conditions(self) -> dict[str, str]:
        """What the plan is for, as a saved plan keeps it: another size, rank or card has another plan."""
        told = {"model": self.label, "card": self.wish.card.name, "trained": self.trained_text}
        told["trained_parameters"] = str(self.trained)
        told["optimizer"] = self.wish.optimizer + (", EMA" if self.wish.ema else "")
        told["accumulation"] = str(self.wish.accumulation)
        told["precision"] = self.wish.precision
        return told | {name: str(value) for name, value in self.sizes.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely not meant."""
        card, budget = self.wish.card, self.wish.budget_bytes
        told = f"{card.name} does not compute in bfloat16, as this plan supposes: steps will take far longer."
        slow = () if card.bf16 else (told,)
        does_something = self.plan is not None and not self.plan.leaves_off
        few = tuple(of_few_tokens(self.tokens)) if does_something else ()
        if budget <= card.memory_bytes:
            return (*slow, *few)
        has = format_bytes(card.memory_bytes)
        return (f"The budget, {format_bytes(budget)}, is more than {card.name} has: {has}.", *slow, *few)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.label,
            "sizes": dict(self.sizes),
            "parameters": self.parameters,
            "trained": self.trained_text,
            "trained_parameters": self.trained,
            "card": self.wish.card.name,
            "optimizer": self.wish.optimizer,
            "ema": self.wish.ema,
            "accumulation": self.wish.accumulation,
            "precision": self.wish.precision,
            "budget_bytes": self.wish.budget_bytes,
            "host_limit_bytes": self.wish.host_limit_bytes,
            "host_limit_binds": self.without_limit is not None,
            "residents": vars(self.residents) | {"total_bytes": self.residents.total_bytes},
            "late_gradients_bytes": self.late_gradients_bytes,
            "update_bytes": self.update_bytes,
            "smallest_peak_bytes": self.smallest_peak_bytes,
            "plan": None if self.plan is None else as_dict(self.plan),
            "without_host_limit": None
            if self.without_limit is None
            else prediction_dict(self.without_limit.prediction),
            "refused": self.refusal,
            "hints": list(self.hints),
            "fits": [vars(fit) for fit in self.fits],
            "warnings": list(self.warnings),
        }


_CUDA = torch.device("cuda")  # autocast there is what is emulated


def _tell_nobody(text: str) -> None:
    pass


def plan_for(wish: Wish, fits: bool = True, told: Callable[[str], None] = _tell_nobody) -> Planned:
    """fits: say as well what would just fit, which takes a few more traces of the forward. told: is told what is done.

    Raises ConfigError for an unknown model, a size that it cannot take, or a forward that cannot be traced.
    """
    forecaster = _Forecaster(wish, told)
    model = forecaster.model(wish.rank)
    assert model.target.build is not None
    allowed = allowed_sizes(model.target.build, config_of(model.target.model))
    check_sizes(wish.sizes, allowed)
    sizes = forecaster.sizes(wish.sizes)
    costs, lying = forecaster.costs(wish.rank, sizes)
    told("searching for the quickest schedule")
    plan, refusal = None, None
    try:
        plan = solve(costs, wish.budget_bytes)
    except ConfigError as error:
        refusal = str(error)
    asked = Asked(sizes, wish.rank, wish.budget_bytes)
    return Planned(
        wish,
        model.target.label,
        sizes,
        model.parameters,
        model.trained,
        lying,
        sum(costs.gradient_bytes[kind] for kinds in costs.stacks.values() for kind in kinds),
        forecaster.update_bytes(model),
        forecaster.smallest_peak(wish.rank, sizes),
        plan,
        refusal,
        tuple(what_fits(forecaster, asked, allowed)) if fits else (),
        _without_limit(costs, wish.budget_bytes, plan),
        costs.tokens,
    )


def plain_bytes(wish: Wish) -> dict[str, list[int]]:
    """What each block keeps where nothing is recomputed or moved, by stack. Raises what ``plan_for`` raises."""
    forecaster = _Forecaster(wish, _tell_nobody)
    costs, _ = forecaster.costs(wish.rank, forecaster.sizes(wish.sizes))
    return {stack: [costs.kinds[kind].plain.kept_bytes for kind in kinds] for stack, kinds in costs.stacks.items()}


def _without_limit(costs: StepCosts, budget_bytes: int, plan: Plan | None) -> Plan | None:
    """The plan with no limit on CPU memory, where it needs more than the limit."""
    limit_bytes = costs.host_limit_bytes
    if limit_bytes is None or (plan is not None and plan.leaves_off):
        return None
    try:
        found = solve(replace(costs, host_limit_bytes=None), budget_bytes)
    except ConfigError:
        return None
    quicker = plan is None or found.prediction.step_ms < plan.prediction.step_ms
    return found if quicker and found.prediction.cpu_bytes > limit_bytes else None


@dataclass(frozen=True)
class _Model:
    """parameters: without the adapter's. trained: those that get gradients."""

    target: Target
    stacks: list[ResolvedStack]
    parameters: int
    trained: int


class _Forecaster:
    """Costs of the wish, and of the same with other sizes or another rank: one model a rank is built, each is traced
    once."""

    def __init__(self, wish: Wish, told: Callable[[str], None]) -> None:
        self.wish = wish
        self._told = told
        self._models: dict[int | None, _Model] = {}
        self._costs: dict[tuple[int | None, tuple[int, ...]], tuple[StepCosts, Residents]] = {}

    def model(self, rank: int | None) -> _Model:
        if rank not in self._models:
            self._told(f"building {self.wish.target}" + (f" with a LoRA of rank {rank}" if rank else ""))
            self._models[rank] = _built(self.wish.target, rank, self.wish.autocast)
        return self._models[rank]

    def sizes(self, chosen: Mapping[str, int]) -> dict[str, int]:
        target = self.model(self.wish.rank).target
        assert target.build is not None
        names = namespace(target.build, {**target.over, **chosen})
        return {name: names[name] for name in target.build.vars}

    def costs(self, rank: int | None, sizes: Mapping[str, int]) -> tuple[StepCosts, Residents]:
        """sizes: all of them."""
        key = rank, tuple(sizes.values())
        if key not in self._costs:
            built = self.model(rank)
            self._told("tracing a step: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
            self._costs[key] = self._forecast(built, sizes)
        return self._costs[key]

    def _forecast(self, built: _Model, sizes: Mapping[str, int]) -> tuple[StepCosts, Residents]:
        model, limit = built.target.model, self.wish.host_limit_bytes
        try:
            inputs = built.target.inputs(torch.bfloat16, over=sizes, device="meta")
        except (RuntimeError, MemoryError) as error:  # masks and whole numbers are made, since they may decide shapes
            raise ConfigError(f"inputs of these sizes cannot be made on this machine: {error}") from error
        lying = self._residents(model, inputs)
        with Casting(_CUDA) if self.wish.autocast else nullcontext():
            costs = forecast(model, built.stacks, inputs, self.wish.card, lying.total_bytes, host_limit_bytes=limit)
        if self.wish.autocast:
            costs = with_casts(costs, built.stacks)
        if self.wish.accumulation == 1:
            costs = costs.with_gradients(block_gradients(model, built.stacks, costs.stacks))
        return replace(costs, elsewhere_bytes=lying.total_bytes + self.update_bytes(built)), lying

    def update_bytes(self, built: _Model) -> int:
        return built.trained * update_bytes(self.wish.optimizer, self.wish.trained_bytes)

    def smallest_peak(self, rank: int | None, sizes: Mapping[str, int]) -> int:
        return smallest_peak(self.costs(rank, sizes)[0]).peak_bytes

    def step_ms(self, rank: int | None, sizes: Mapping[str, int]) -> float:
        return solve(self.costs(rank, sizes)[0], self.wish.budget_bytes).prediction.step_ms

    def resident_bytes(self) -> int:
        """Of the wish's model, without inputs."""
        return self._residents(self.model(self.wish.rank).target.model, {}).total_bytes

    def _residents(self, model: nn.Module, inputs: Mapping[str, Any]) -> Residents:
        kept = state_bytes(self.wish.optimizer, self.wish.trained_bytes)
        return residents(model, inputs, state_bytes=kept, ema=self.wish.ema)

    def adapter_bytes(self) -> int:
        """Of what is trained: its weights, gradients, optimizer states and mean."""
        lying = self._residents(self.model(self.wish.rank).target.model, {})
        return 2 * lying.gradients_bytes + lying.states_bytes + lying.ema_bytes


def _built(name: str, rank: int | None, autocast: bool) -> _Model:
    target = open_target(name, "real", device="meta", dtype=torch.bfloat16, folder_inputs="real")
    if target.build is None:
        raise ConfigError(
            f"{target.label}: no family describes its class, so its inputs are unknown, and nothing can be planned"
        )
    model = target.model.train()
    parameters = sum(weight.numel() for weight in model.parameters())
    stacks = resolve(model, target.family.stacks if target.family else None)
    trained_in = torch.float32 if autocast else torch.bfloat16
    if rank is None:
        for weight in model.parameters():
            weight.data = weight.data.to(trained_in)
    else:
        model.requires_grad_(False)
        with torch.device("meta"):  # or it is filled with random numbers in CPU memory
            add_lora(model, stacks, rank, trained_in, target.family.lora_targets if target.family else None)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return _Model(target, stacks, parameters, trained)
