"""How far from the best ``backend="auto"`` settles where forecasts, timings and hosts err: made-up steps, no card.

    python benchmarks/auto_by_chance.py synthetic:16x4096 wan21_1_3b:FR=17 --runs 24 --save results/auto_by_chance.jsonl

Each run draws a machine that the forecast is wrong about (blocks, each kind of recomputation, copies), and probes that
are wrong about the machine; the first steps under ``auto`` then take what that machine would, and a host makes some of
them late. What stays is compared with the quickest plan that fits in the same room, by the machine's own times: nothing
else is known that exactly on a card.

Bytes are as forecast, unless ``--bytes``: then working sets and copies in flight are others, what is reserved beyond
tensors is drawn, too, and a plan that comes too close to the limit is slow, or a step runs out of memory and ends it.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from planner import condition_of
from torch.utils._pytree import tree_map_only

from lowtide.auto.budget import within_pages
from lowtide.auto.measuring import measuring
from lowtide.auto.planner import Planner
from lowtide.bench.provenance import provenance
from lowtide.bench.works import build
from lowtide.cli.options import sizes_of
from lowtide.handle import rows_for
from lowtide.measure.cards import find_card
from lowtide.measure.meter import CudaMeter
from lowtide.measure.probe import BlockMemory, BlockTime, Probed
from lowtide.plan.answer import Plan
from lowtide.plan.assignment import assignment_of, placed
from lowtide.plan.costs import BlockKind, StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_schedule
from lowtide.plan.schedule import BOUNDARY, FFN, KEPT, MIN_BYTES, SELECTIVE, WHOLE, Schedule
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
WORKING, IN_FLIGHT, RELIEF, INPUTS, BEYOND = (-0.01, 0.06), (0.8, 1.1), (0.0, 1.0), (0.0, 2.0), (0.02, 0.06)
"""Bytes: of working sets, what forecasts have too much (whole and selective blocks were off by the same); copies in
flight, for one as forecast, and what they are spared at feed-forward sides; further inputs of blocks that are there;
what is reserved beyond tensors, of the smallest peak. As 160 schedules showed on H200s (`benchmarks/LOG.md`,
2026-12-01)."""
SPREAD = 0.15
"""By how much what is reserved beyond tensors differs from plan to plan."""
EVERYTHING = 2**60
NEEDED, CROWDED = 0.7, 0.1
"""Of what a plan reserves beyond tensors, what it cannot do without: with less its steps run out of memory. With less
than all of it they take longer by so much."""
CARD = torch.device("cuda:0")
"""A name: nothing runs there."""


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
    memory: "Memory | None" = None
    ran_out: bool = False

    @classmethod
    def drawn(cls, foreseen: StepCosts, noise: float, busy: float, seed: int) -> "Machine":
        """Its bytes are as foreseen."""
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
        return predict_schedule(self.costs, schedule).step_ms

    def step(self) -> Probed:
        """A step under what is attached, as it was seen."""
        assert self.schedule is not None
        self.steps += 1
        begins = self.busy / (1 - self.busy) / PERIOD
        self.is_busy = self.draw.random() < (1 - 1 / PERIOD if self.is_busy else begins) if self.busy else False
        times, step_ms = dict(self._block_times(self.schedule)), self.step_ms(self.schedule) * self._late()
        if self.memory is None:
            return Probed(times, {}, step_ms, None, None)
        peak_bytes = predict_schedule(self.costs, self.schedule).highest.peak_bytes
        peak_bytes -= self.memory.states_bytes if self.steps == 1 else 0
        beyond_bytes = self.memory.beyond(self.schedule)
        crowded = peak_bytes + beyond_bytes > self.memory.allowed_bytes
        self.ran_out = peak_bytes + NEEDED * beyond_bytes > self.memory.allowed_bytes
        reserved_bytes = min(self.memory.allowed_bytes, peak_bytes + beyond_bytes)
        seen = dict(self._block_memory(self.schedule))
        return Probed(times, seen, step_ms * (1 + CROWDED * crowded), peak_bytes, reserved_bytes, int(crowded))

    def _block_memory(self, schedule: Schedule) -> Iterator[tuple[tuple[str, int], BlockMemory]]:
        for stack, first, _, cost in placed(self.costs, assignment_of(self.costs, schedule)):
            for index in range(first, first + cost.blocks):
                yield (stack, index), BlockMemory(cost.kept_bytes, cost.at_work_bytes)

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


@dataclass
class Memory:
    """Of a made-up card. allowed_bytes: what may be reserved. beyond_bytes: about what is, beyond tensors.
    states_bytes: of the optimizer, that the first update puts there."""

    allowed_bytes: int
    beyond_bytes: int
    meter: "Lies"
    states_bytes: int

    def update(self, planner: Planner) -> None:
        self.meter.lies_bytes += self.states_bytes
        planner.note_update()

    def beyond(self, schedule: Schedule) -> int:
        return int(self.beyond_bytes * _about(random.Random(repr(schedule)), SPREAD))


class Lies(CudaMeter):
    """Tells what lies there throughout a step, and no more."""

    def __init__(self) -> None:
        super().__init__(CARD)
        self.lies_bytes = 0

    def allocated(self) -> int:
        return self.lies_bytes

    def failures(self) -> int:
        return 0


def with_other_bytes(costs: StepCosts, draw: random.Random) -> StepCosts:
    """A machine's costs, where forecasts of bytes are wrong, too."""
    of = {treatment: 1 - draw.uniform(*WORKING) for treatment in (KEPT, FFN, WHOLE)}
    of[SELECTIVE] = of[WHOLE]

    def other(kind: BlockKind) -> BlockKind:
        ways = (replace(way, working_bytes=int(of[way.treatment] * way.working_bytes)) for way in kind.treatments)
        return replace(kind, treatments=tuple(ways))

    relief = draw.uniform(*RELIEF)
    kinds = {name: other(kind).with_relief(relief, EVERYTHING) for name, kind in costs.kinds.items()}
    inputs = [way.copied_bytes for kind in kinds.values() for way in kind.treatments if way.moves == {BOUNDARY}]
    return replace(
        costs,
        kinds=kinds,
        resident_bytes=costs.resident_bytes + int(draw.uniform(*INPUTS) * min(inputs, default=0)),
        in_flight_share=draw.uniform(*IN_FLIGHT),
        in_flight_known_bytes=EVERYTHING,
    )


def on_a_card(foreseen: Planner, budget_bytes: int, beyond_bytes: int) -> tuple[Planner, Memory]:
    """The same, as if it ran on one: held to the budget, with a meter."""
    planner = replace(foreseen, device=CARD, budget_bytes=budget_bytes, _seen=[])
    assert foreseen._lying is not None and foreseen.costs is not None
    lying = planner._lying = copy(foreseen._lying)
    lying._meter = meter = Lies()
    lying.now_bytes()  # counts the workspace of libraries once
    states_bytes = lying.to_come_bytes()
    meter.lies_bytes = foreseen.costs.resident_bytes - lying.now_bytes() - states_bytes - planner._shared_bytes
    planner._now_bytes = lying.now_bytes()
    return planner, Memory(within_pages(CARD, budget_bytes), beyond_bytes, meter, states_bytes)


def _about(draw: random.Random, error: float) -> float:
    return draw.uniform(1 - error, 1 + error)


def settled(
    foreseen: Planner, share: float, noise: float, busy: float, seed: int, other_bytes: bool
) -> tuple[float | None, int]:
    """By which share of its time what stays is slower than the best, and after how many steps it stays. None: the last
    of these ran out of memory."""
    assert foreseen.costs is not None
    machine = Machine.drawn(foreseen.costs, noise, busy, seed)
    draw, beyond_bytes = random.Random(seed), 0
    if other_bytes:
        machine.costs = with_other_bytes(machine.costs, draw)
        beyond_bytes = int(draw.uniform(*BEYOND) * smallest_peak(machine.costs).peak_bytes)
    least = ABOVE * (smallest_peak(machine.costs).peak_bytes + beyond_bytes)
    most = solve(machine.costs, 2**60).prediction.peak_bytes
    budget_bytes = int(least + share * (most - least))
    if other_bytes:
        planner, machine.memory = on_a_card(foreseen, budget_bytes, beyond_bytes)
    else:
        planner = replace(foreseen, budget_bytes=budget_bytes, _seen=[])
    steps = measuring(planner, machine)
    try:
        next(steps)
        while True:
            probed = machine.step()
            if machine.ran_out:
                return None, machine.steps
            if machine.memory is not None and machine.steps == 1:
                machine.memory.update(planner)
                machine.costs = machine.costs.with_gradients(planner._gradients)
            planner.begin_step()
            steps.send(probed)
    except StopIteration:
        pass
    assert machine.stays is not None and planner.costs is not None
    took_ms = machine.step_ms(machine.stays.schedule)
    if machine.memory is None:
        room_bytes = planner.plan(like=True).budget_bytes
        true = replace(machine.costs, resident_bytes=planner.costs.resident_bytes)
    else:
        room_bytes, true = machine.memory.allowed_bytes - beyond_bytes, machine.costs
    best_ms = solve(true, room_bytes).prediction.step_ms
    return max(0.0, took_ms / best_ms - 1), machine.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", help="a family, with sizes as in wan21_1_3b:FR=33,H=480; synthetic:16x4096")
    parser.add_argument("--runs", type=int, default=24, help="machines drawn, each at four budgets")
    parser.add_argument("--noise", type=float, default=0.03, help="of a step's time")
    parser.add_argument("--busy", type=float, default=0.0, help="share of steps in periods in which the host is busy")
    parser.add_argument("--bytes", action="store_true", help="forecasts of bytes are wrong, too")
    parser.add_argument("--card", default="RTX 4090", help="whose figures the forecast has")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    for work in options.works:
        name, sizes = named(work)
        foreseen = forecast(name, sizes, options.card)
        found = {
            share: [
                settled(foreseen, share, options.noise, options.busy, seed, options.bytes)
                for seed in range(options.runs)
            ]
            for share in SHARES
        }
        all_runs = [run for runs in found.values() for run in runs]
        behind = [each for each, _ in all_runs if each is not None]
        ran_out = [steps for each, steps in all_runs if each is None]
        over = {f"over {limit:.0%}": sum(each > limit for each in behind) / len(behind) for limit in (0.02, 0.04, 0.08)}
        told = ", ".join(f"{name} {share:.1%}" for name, share in over.items())
        most = max(steps for _, steps in all_runs)
        print(f"{work}: behind by {statistics.mean(behind):.2%} on average, of runs {told}; {most} steps at most")
        if options.bytes:
            print(f"  out of memory: {len(ran_out)} of {len(all_runs)}, in steps {sorted(ran_out)}")
        if options.save is not None:
            line = {
                "work": name,
                "sizes": sizes,
                "forecast_card": options.card,
                "noise": options.noise,
                "busy": options.busy,
                "bytes": options.bytes,
                "behind": {
                    str(share): [each if each is None else round(each, 5) for each, _ in runs]
                    for share, runs in found.items()
                },
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
