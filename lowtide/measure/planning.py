"""``lowtide plan``: the quickest schedule for a model, its inputs and a budget, from shapes alone."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lowtide.errors import ConfigError
from lowtide.measure.adapter import add_lora
from lowtide.measure.build import Target, open_target
from lowtide.measure.cards import Card
from lowtide.measure.forecast import forecast
from lowtide.measure.inputs import namespace
from lowtide.measure.residents import Residents, residents
from lowtide.plan.costs import StepCosts
from lowtide.plan.explain import as_dict
from lowtide.plan.solve import Plan, smallest_peak, solve
from lowtide.runtime.resolve import ResolvedStack, resolve

_TRIES = 5
_MOST_TIMES = 16
_FLOAT32_BYTES = 4
_RESOLUTION_STEP = 64
_LARGEST_RANK = 1024


@dataclass(frozen=True)
class Wish:
    """What is to be trained, and in how much memory.

    target: a family's name or a model's folder. sizes: of the inputs, by the names of the family's row. rank: of a
    LoRA; None: all weights are trained. What is trained is in float32, with AdamW under bf16 autocast. budget_bytes:
    what PyTorch may reserve. host_limit_bytes: CPU memory for what moves; None: no limit.
    """

    target: str
    budget_bytes: int
    card: Card
    sizes: Mapping[str, int] = field(default_factory=dict)
    rank: int | None = 16
    host_limit_bytes: int | None = None


@dataclass(frozen=True)
class Fit:
    """How much of one thing would just fit with the best schedule, all else unchanged. 0: not even the least."""

    name: Literal["batch", "resolution", "frames", "rank"]
    asked: str
    largest: str


@dataclass(frozen=True)
class Planned:
    """plan: None where nothing fits; refusal says so then. sizes: all of the inputs."""

    wish: Wish
    label: str
    sizes: Mapping[str, int]
    parameters: int
    trained: int
    residents: Residents
    smallest_peak_bytes: int
    plan: Plan | None
    refusal: str | None
    fits: tuple[Fit, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.label,
            "sizes": dict(self.sizes),
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "card": self.wish.card.name,
            "budget_bytes": self.wish.budget_bytes,
            "residents": vars(self.residents) | {"total_bytes": self.residents.total_bytes},
            "smallest_peak_bytes": self.smallest_peak_bytes,
            "plan": None if self.plan is None else as_dict(self.plan),
            "refused": self.refusal,
            "fits": [vars(fit) for fit in self.fits],
        }


def plan_for(wish: Wish, fits: bool = True) -> Planned:
    """fits: say as well what would just fit, which takes a few more traces of the forward.

    Raises ConfigError for an unknown model, size or a forward that cannot be traced.
    """
    forecaster = _Forecaster(wish)
    model = forecaster.model(wish.rank)
    sizes = forecaster.sizes(wish.sizes)
    costs, lying = forecaster.costs(wish.rank, wish.sizes)
    plan, refusal = None, None
    try:
        plan = solve(costs, wish.budget_bytes)
    except ConfigError as error:
        refusal = str(error)
    return Planned(
        wish,
        model.target.label,
        sizes,
        model.parameters,
        sum(weight.numel() for weight in model.target.model.parameters() if weight.requires_grad),
        lying,
        smallest_peak(costs).peak_bytes,
        plan,
        refusal,
        tuple(_fits(forecaster, wish, sizes)) if fits else (),
    )


@dataclass(frozen=True)
class _Model:
    """parameters: without the adapter's."""

    target: Target
    stacks: list[ResolvedStack]
    parameters: int


class _Forecaster:
    """Costs of the wish, and of the same with other sizes or another rank: one model a rank is built."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._models: dict[int | None, _Model] = {}

    def model(self, rank: int | None) -> _Model:
        if rank not in self._models:
            self._models[rank] = _built(self.wish.target, rank)
        return self._models[rank]

    def sizes(self, chosen: Mapping[str, int]) -> dict[str, int]:
        target = self.model(self.wish.rank).target
        assert target.build is not None
        names = namespace(target.build, {**target.over, **chosen})
        return {name: names[name] for name in target.build.vars}

    def costs(self, rank: int | None, sizes: Mapping[str, int]) -> tuple[StepCosts, Residents]:
        built = self.model(rank)
        model = built.target.model
        inputs = built.target.inputs(torch.bfloat16, over=sizes, device="meta")
        lying = residents(model, inputs, trained_bytes=_FLOAT32_BYTES)
        limit = self.wish.host_limit_bytes
        return (
            forecast(model, built.stacks, inputs, self.wish.card, lying.total_bytes, host_limit_bytes=limit),
            lying,
        )

    def smallest_peak(self, rank: int | None, sizes: Mapping[str, int]) -> int:
        return smallest_peak(self.costs(rank, sizes)[0]).peak_bytes


def _built(name: str, rank: int | None) -> _Model:
    target = open_target(name, "real", device="meta", dtype=torch.bfloat16)
    if target.build is None:
        raise ConfigError(
            f"{target.label}: no family describes its class, so its inputs are unknown, and nothing can be planned"
        )
    model = target.model.train()
    parameters = sum(weight.numel() for weight in model.parameters())
    stacks = resolve(model, target.family.stacks if target.family else None)
    if rank is not None:
        model.requires_grad_(False)
        add_lora(model, stacks, rank)
    return _Model(target, stacks, parameters)


def _fits(forecaster: _Forecaster, wish: Wish, sizes: Mapping[str, int]) -> Iterator[Fit]:
    def peak(**more: int) -> int:
        return forecaster.smallest_peak(wish.rank, {**wish.sizes, **more})

    budget = wish.budget_bytes
    if "B" in sizes:
        yield Fit("batch", str(sizes["B"]), str(_largest(lambda number: peak(B=number), budget, sizes["B"], 1)))
    if sizes.get("FR", 1) > 1:
        step = 8 if sizes["FR"] % 8 == 1 else 4
        count = _largest(lambda number: peak(FR=number * step + 1), budget, sizes["FR"] // step, 1)
        yield Fit("frames", str(sizes["FR"]), str(count * step + 1 if count else 0))
    if {"H", "W"} <= sizes.keys():
        yield _largest_picture(lambda height, width: peak(H=height, W=width), budget, sizes["H"], sizes["W"])
    if wish.rank is not None:
        rank = _largest(lambda number: forecaster.smallest_peak(number, wish.sizes), budget, wish.rank, 4)
        yield Fit("rank", str(wish.rank), f"{_LARGEST_RANK}+" if rank > _LARGEST_RANK else str(rank))


def _largest_picture(peak: Callable[[int, int], int], budget: int, height: int, width: int) -> Fit:
    """Of the same shape, as near as sides that are multiples of 64 allow."""

    def sides(tokens: int) -> tuple[int, int]:
        scale = (tokens / (height * width / _RESOLUTION_STEP**2)) ** 0.5
        return tuple(max(1, int(side * scale / _RESOLUTION_STEP)) * _RESOLUTION_STEP for side in (height, width))  # type: ignore[return-value]

    asked = max(1, height * width // _RESOLUTION_STEP**2)
    tokens = _largest(lambda number: peak(*sides(number)), budget, asked, 1)
    tall, wide = sides(tokens) if tokens else (0, 0)
    return Fit("resolution", f"{width}x{height}", f"{wide}x{tall}")


def _largest(peak: Callable[[int], int], budget: int, asked: int, step: int) -> int:
    """The largest multiple of ``step`` that was seen to fit, near the true one: the peak rises about linearly. 0: none.

    What the model cannot take does not fit. More than ``_MOST_TIMES`` what was asked is not looked for.
    """

    def seen(number: int) -> float:
        try:
            return peak(number)
        except (ValueError, RuntimeError, ConfigError):
            return math.inf

    low, at_low, high, at_high = 0, 0.0, asked, seen(asked)
    if at_high <= budget:
        low, at_low, high = asked, at_high, 2 * asked
        at_high = seen(high)
    for _ in range(_TRIES):
        if at_high <= budget:
            if high >= _MOST_TIMES * asked:
                return high
            rise = max(1e-9, (at_high - at_low) / (high - low))
            low, at_low = high, at_high
            high = min(_MOST_TIMES * asked, max(high + step, int(high + 1.1 * (budget - at_high) / rise)))
        else:
            share = (budget - at_low) / (at_high - at_low) if at_high < math.inf and low else 0.5
            high, at_high = low + int((high - low) * min(share, 0.98)), math.inf
        high = high // step * step
        if high <= low:
            break
        at_high = seen(high)
    return high if low < high and at_high <= budget else low // step * step
