"""How far from the best ``backend="auto"`` settles where forecasts, timings and hosts err: made-up steps, no card.

    python benchmarks/auto_by_chance.py synthetic:16x4096 wan21_1_3b:FR=17 --runs 24 --save results/auto_by_chance.jsonl

Each run draws a machine that the forecast is wrong about (blocks, each kind of recomputation, copies), and probes that
are wrong about the machine; the first steps under ``auto`` then take what that machine would, and a host makes some of
them late. Bytes are as forecast. What stays is compared with the quickest plan that fits in the same room, by the
machine's own times: nothing else is known that exactly on a card.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from planner import condition_of
from torch.utils._pytree import tree_map_only

from lowtide.auto.measuring import measuring
from lowtide.auto.planner import Planner
from lowtide.bench.provenance import provenance
from lowtide.bench.works import build
from lowtide.cli.options import sizes_of
from lowtide.handle import rows_for
from lowtide.measure.cards import find_card
from lowtide.measure.probe import BlockTime, Probed
from lowtide.plan.answer import Plan
from lowtide.plan.assignment import assignment_of, placed
from lowtide.plan.costs import BlockKind, StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import FFN, MIN_BYTES, SELECTIVE, WHOLE, Schedule
from lowtide.plan.solve import smallest_peak, solve

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of the way from just above the smallest peak to the plain run's: the budgets."""
ABOVE = 1.03
BLOCKS, TREATMENTS, COPIES, PROBES = 0.3, 0.25, 0.3, 0.25
"""By how much forecasts err at most: of the time of blocks, of what a treatment adds; the most that copies take of
their own time though nobody waits for them; and by how much probes of single blocks err about what a treatment adds."""
LATE = 0.1
"""Of all steps, that are late by three times the noise."""
SLOWER, PERIOD = 0.2, 6
"""By how much every step takes longer while the host is busy with something else, and how many steps that lasts on
average."""
WRONG = (FFN, SELECTIVE, WHOLE)


class Given(Exception):
    """What the model was called with is known: its forward need not run."""


def forecast(work: str, sizes: dict[str, int], card: str) -> Planner:
    """With the costs of the work's step on that card."""
    task = build(condition_of(work, "real", sizes), "meta")

    def stop(_: Any, *call: Any) -> None:
        raise Given(*call)

    hook = task.model.register_forward_pre_hook(stop, with_kwargs=True)
    planner = Planner(task.model, rows_for(task.model, None)[1], torch.device("cpu"), 2**60, MIN_BYTES, can_move=True)
    planner.card = find_card(card)
    try:
        task.forward()
    except Given as given:
        hook.remove()
        planner.forecast(*tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), given.args))
    return planner


@dataclass
class Machine:
    """A machine that differs from what was forecast. costs: what steps take there. probes: what single blocks seem to
    add there under a treatment, of what they do add. noise: of a step's time. busy: of all steps, the share in periods
    in which the host is busy."""

    costs: StepCosts
    probes: Mapping[str, float]
    noise: float
    busy: float
    draw: random.Random
    schedule: Schedule | None = None
    stays: Plan | None = None
    steps: int = 0
    is_busy: bool = False

    @classmethod
    def drawn(cls, foreseen: StepCosts, noise: float, busy: float, seed: int) -> "Machine":
        draw = random.Random(seed)
        slower = _about(draw, BLOCKS)
        of = {treatment: _about(draw, TREATMENTS) for treatment in WRONG}
        copies = draw.uniform(0, COPIES)

        def cost_of(kind: BlockKind, cost: TreatmentCost) -> TreatmentCost:
            times = slower * of.get(cost.treatment, 1.0)
            copies_ms = copies * foreseen.link.out_ms(cost.copied_bytes) if foreseen.link is not None else 0.0
            backward_ms = times * (cost.extra_backward_ms - kind.copying_ms(cost)) + copies_ms
            return replace(cost, extra_forward_ms=times * cost.extra_forward_ms, extra_backward_ms=backward_ms)

        kinds = {
            name: replace(
                kind,
                forward_ms=kind.forward_ms * slower,
                backward_ms=kind.backward_ms * slower,
                treatments=tuple(cost_of(kind, cost) for cost in kind.treatments),
            )
            for name, kind in foreseen.kinds.items()
        }
        costs = replace(foreseen, kinds=kinds, other_ms=foreseen.other_ms * slower)
        return cls(costs, {treatment: _about(draw, PROBES) for treatment in WRONG}, noise, busy, draw)

    def run_under(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def take(self, plan: Plan, settled: bool) -> None:
        self.schedule = plan.schedule
        self.stays = plan if settled else None

    def step_ms(self, schedule: Schedule) -> float:
        return predict_step(self.costs, assignment_of(self.costs, schedule)).step_ms

    def step(self) -> Probed:
        """A step under what is attached, as it was seen."""
        assert self.schedule is not None
        self.steps += 1
        begins = self.busy / (1 - self.busy) / PERIOD
        self.is_busy = self.draw.random() < (1 - 1 / PERIOD if self.is_busy else begins) if self.busy else False
        return Probed(
            dict(self._block_times(self.schedule)), {}, self.step_ms(self.schedule) * self._late(), None, None
        )

    def _block_times(self, schedule: Schedule) -> Iterator[tuple[tuple[str, int], BlockTime]]:
        for stack, first, name, cost in placed(self.costs, assignment_of(self.costs, schedule)):
            kind, wrong = self.costs.kinds[name], self.probes.get(cost.treatment, 1.0) / cost.blocks
            for index in range(first, first + cost.blocks):
                forward_ms = (kind.forward_ms + wrong * cost.extra_forward_ms) * self._late()
                backward_ms = (kind.backward_ms + wrong * cost.extra_backward_ms) * self._late()
                yield (stack, index), BlockTime(forward_ms, backward_ms)

    def _late(self) -> float:
        late = (1 + abs(self.draw.gauss(0, self.noise))) * (1 + SLOWER * self.is_busy)
        return late * (1 + 3 * self.noise) if self.draw.random() < LATE else late


def _about(draw: random.Random, error: float) -> float:
    return draw.uniform(1 - error, 1 + error)


def settled(foreseen: Planner, share: float, noise: float, busy: float, seed: int) -> tuple[float, int]:
    """By which share of its time what stays is slower than the best, and after how many steps it stays."""
    assert foreseen.costs is not None
    least = ABOVE * smallest_peak(foreseen.costs).peak_bytes
    most = solve(foreseen.costs, 2**60).prediction.peak_bytes
    planner = replace(foreseen, budget_bytes=int(least + share * (most - least)), _seen=[])
    machine = Machine.drawn(foreseen.costs, noise, busy, seed)
    steps = measuring(planner, machine)
    try:
        next(steps)
        while True:
            probed = machine.step()
            planner.begin_step()
            steps.send(probed)
    except StopIteration:
        pass
    assert machine.stays is not None and planner.costs is not None
    took_ms = machine.step_ms(machine.stays.schedule)
    room = planner.plan(like=True).budget_bytes
    best = solve(replace(machine.costs, resident_bytes=planner.costs.resident_bytes), room).prediction.step_ms
    return max(0.0, took_ms / best - 1), machine.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", help="a family, with sizes as in wan21_1_3b:FR=33,H=480; synthetic:16x4096")
    parser.add_argument("--runs", type=int, default=24, help="machines drawn, each at four budgets")
    parser.add_argument("--noise", type=float, default=0.03, help="of a step's time")
    parser.add_argument("--busy", type=float, default=0.0, help="share of steps in periods in which the host is busy")
    parser.add_argument("--card", default="RTX 4090", help="whose figures the forecast has")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    for work in options.works:
        name, sizes = named(work)
        foreseen = forecast(name, sizes, options.card)
        found = {
            share: [settled(foreseen, share, options.noise, options.busy, seed) for seed in range(options.runs)]
            for share in SHARES
        }
        behind = [each for runs in found.values() for each, _ in runs]
        over = {f"over {limit:.0%}": sum(each > limit for each in behind) / len(behind) for limit in (0.02, 0.04, 0.08)}
        told = ", ".join(f"{name} {share:.1%}" for name, share in over.items())
        most = max(steps for runs in found.values() for _, steps in runs)
        print(f"{work}: behind by {statistics.mean(behind):.2%} on average, of runs {told}; {most} steps at most")
        if options.save is not None:
            line = {
                "work": name,
                "sizes": sizes,
                "forecast_card": options.card,
                "noise": options.noise,
                "busy": options.busy,
                "behind": {str(share): [round(each, 5) for each, _ in runs] for share, runs in found.items()},
                "steps": {str(share): [steps for _, steps in runs] for share, runs in found.items()},
                **provenance("cpu"),
            }
            with options.save.open("a") as out:
                out.write(json.dumps(line) + "\n")


def named(work: str) -> tuple[str, dict[str, int]]:
    """``wan21_1_3b:FR=33,H=480``: name and sizes."""
    if work.startswith("synthetic:"):
        return work, {}
    name, _, text = work.partition(":")
    return name, sizes_of(list(filter(None, text.split(","))))


if __name__ == "__main__":
    main()
