"""What ``backend="auto"`` chooses, beside every fixed mode and random schedules: time, peak, and what was predicted.

    python benchmarks/planner.py flux1 synthetic:16x4096 --save results/planner.jsonl

One process a work: first all other settings, each attached, warmed up and timed, then ``auto`` within one budget after
another. Budgets go from just above the least that any fixed mode reserves to what the plain run does. Peaks are of
allocation, and of what PyTorch reserved, from empty caches on. The schedule that ``auto`` settled on and the quickest
setting that fits then take turns: of thirty settings one always had luck, and a host has better and worse minutes.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from pinned_cache import pinned_once
from planner_table import IN_TURNS, KEPT_BYTES, kept_totals, quickest

import lowtide
from lowtide.auto.budget import Limit
from lowtide.auto.handle import AutoHandle
from lowtide.auto.measuring import MOST_STEPS
from lowtide.auto.planner import Planner
from lowtide.bench.attention import kernels
from lowtide.bench.modes import ATTACHED, NONE
from lowtide.bench.provenance import machine
from lowtide.bench.record import Condition
from lowtide.bench.sweep import family_conditions, synthetic_conditions
from lowtide.bench.works import Task, build
from lowtide.cli.options import sizes_of
from lowtide.errors import ConfigError
from lowtide.handle import rows_for
from lowtide.keys import AUTO
from lowtide.measure.meter import meter_of
from lowtide.measure.probe import StepProbe
from lowtide.plan.schedule import Schedule, mixed
from lowtide.testing import cpu_offload
from lowtide.train.progress import told
from lowtide.units import format_bytes

ALLOCATOR = ("num_alloc_retries", "num_device_alloc", "num_device_free")
"""What PyTorch's allocator counts: caches given back for want of memory, and calls of the driver."""
ENOUGH_S = 1.5
"""Of timed steps: no further one is begun after two."""
NO_LIMIT = 2**60
TURN_STEPS = 2
"""Timed steps of each turn at least: hosts drift, so many short turns say more than few long ones."""
WORDS = (
    "kept", "kept+attention", "kept+saved", "ffn", "ffn+boundary", "ffn+boundary+attention", "selective",
    "selective+boundary+attention", "whole", "whole+boundary",
)  # fmt: skip


def condition_of(name: str, size: str, sizes: dict[str, int]) -> Condition:
    kind, _, shape = name.partition(":")
    common: dict[str, Any] = {"size": size, "attention": "no-cudnn", "rank": 16}
    if kind == "synthetic":
        return next(synthetic_conditions([shape], [NONE], ["lora"], **common))
    return next(family_conditions([name], [NONE], sizes, adapter="lora", **common))


def measure(task: Task, device: str, warm_up: int, steps: int) -> dict[str, Any]:
    """Median seconds and peaks of some steps under what is attached."""
    for _ in range(warm_up):
        task.step()
    times = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats() if device == "cuda" else {}
    for _ in range(steps):
        if len(times) > 1 and sum(times) > ENOUGH_S:
            break
        start = time.perf_counter()
        task.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    figures = {"step_s": statistics.median(times), "step_times_s": times}
    if device == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
        figures |= {name: torch.cuda.memory_stats()[name] - before[name] for name in ALLOCATOR}
    return figures


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def fixed(task: Task, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for mode in options.fixed or (NONE, *(name for name in ATTACHED if name != AUTO)):
        clear(options.device)
        try:
            with nullcontext() if mode == NONE else lowtide.attach(task.model, **ATTACHED[mode], **options.more) as ran:
                figures = measure(task, options.device, options.warm_up, options.steps)
                yield {"setting": mode, **figures, "totals": None if ran is None else ran.receipt().totals}
        except (ConfigError, torch.OutOfMemoryError) as error:
            yield {"setting": mode, "failed": f"{type(error).__name__}: {error}"[:200]}
        for tensor in task.trained:
            tensor.grad = None


def kept(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """What all blocks keep in a plain step: as a forecast from shapes says, and as a step shows."""
    clear(options.device)
    device, given = torch.device(options.device), []
    hook = task.model.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True)
    probe = StepProbe(task.stacks, device, meter_of(device), each=True).start()
    task.step()
    seen = probe.stop()
    hook.remove()
    planner = Planner(task.model, rows_for(task.model, None)[1], device, 2**50, 1, can_move=True)
    planner.forecast(*given[0])
    assert seen is not None and planner.costs is not None
    forecast = {
        name: [planner.costs.kinds[kind].plain.kept_bytes for kind in kinds]
        for name, kinds in planner.costs.stacks.items()
    }
    return {
        "setting": KEPT_BYTES,
        "forecast_bytes": forecast,
        "probed_bytes": {
            name: [seen.memory[name, index].kept_bytes if seen.memory else 0 for index in range(len(blocks))]
            for name, blocks in forecast.items()
        },
    }


def chosen(task: Task, budget: int, options: argparse.Namespace) -> tuple[dict[str, Any], Schedule | None]:
    """``auto`` within a budget, and the schedule that stayed. cold: the first plan, and the peak of its step."""
    clear(options.device)
    line: dict[str, Any] = {"setting": AUTO, "budget_bytes": budget, "log": []}
    stayed = None
    try:
        with (
            told(line["log"].append),
            lowtide.attach(task.model, backend="auto", vram_budget=budget, **options.more) as handle,
        ):
            assert isinstance(handle, AutoHandle)
            start = time.perf_counter()
            first = measure(task, options.device, 0, 1)
            assert handle.plan is not None
            line["cold"] = {**first, "predicted_bytes": handle.plan.prediction.peak_bytes}
            line["steps"] = 1 + until_settled(task, handle)
            line["settled_s"] = time.perf_counter() - start
            if options.device == "cuda":
                line["most_reserved_bytes"] = max(first["reserved_bytes"], torch.cuda.max_memory_reserved())
            line |= measure(task, options.device, 0, options.steps)
            stayed = handle.schedule
            made, before = handle.plan.prediction, handle.plan.foreseen or handle.plan.prediction
            line |= {
                "predicted_bytes": before.peak_bytes,
                "predicted_ms": before.step_ms,
                "known_bytes": made.peak_bytes,
                "mode": handle.plan.mode,
                "source": handle.plan.source,
                "totals": handle.receipt().totals,
                "treatments": {name: list(stack.words) for name, stack in handle.schedule.stacks.items()},
            }
    except (ConfigError, torch.OutOfMemoryError) as error:
        line["failed"] = f"{type(error).__name__}: {error}"[:600]
    return line, stayed


def until_settled(task: Task, handle: AutoHandle) -> int:
    """Steps made. The last one is the first under the schedule that stays."""
    for number in range(1, MOST_STEPS):
        task.step()
        if handle.settled:
            return number
    raise RuntimeError(f"auto has not settled within {MOST_STEPS} steps")


def drawn(task: Task, count: int) -> dict[str, Schedule]:
    """Schedules of two to four treatments in a random mixture, block by block."""
    draw, found = random.Random(0), {}
    for number in range(count):
        words = draw.sample(WORDS, draw.randint(2, 4))
        weights = [draw.random() for _ in words]
        stacks = {stack.name: mixed(draw.choices(words, weights, k=len(stack.blocks))) for stack in task.stacks}
        found[f"random {number}"] = Schedule(stacks)
    return found


def at_random(task: Task, schedules: dict[str, Schedule], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, schedule in schedules.items():
        words = sorted({word for stack in schedule.stacks.values() for word in stack.words})
        try:
            clear(options.device)
            with lowtide.attach(task.model, schedule=schedule, **options.more) as ran:
                figures = measure(task, options.device, options.warm_up, options.steps)
                yield {"setting": name, "words": words, **figures, "totals": ran.receipt().totals}
        except (ConfigError, torch.OutOfMemoryError) as error:
            yield {"setting": name, "words": words, "failed": f"{type(error).__name__}: {error}"[:200]}


def in_turns(
    task: Task, stayed: Schedule, budget: int, name: str, schedules: dict[str, Schedule], options: argparse.Namespace
) -> dict[str, Any]:
    """The schedule that stayed, held to its budget as ``auto`` holds it, beside another setting: medians of all turns.

    schedules: those drawn at random.
    """
    other = {"schedule": schedules[name]} if name in schedules else dict(ATTACHED.get(name, {}))
    sides = {"auto": {"schedule": stayed}, "other": other}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for side in [*sides] * options.turns:
        clear(options.device)
        with lowtide.attach(task.model, **sides[side], **options.more) if sides[side] else nullcontext():
            limit = Limit(task.trained[0].device, budget if side == "auto" else NO_LIMIT)
            try:
                found = measure(task, options.device, options.warm_up, max(TURN_STEPS, options.steps))
            finally:
                limit.lift()
            times[side] += found["step_times_s"]
    medians = {f"{side}_step_s": statistics.median(taken) for side, taken in times.items()}
    return {"setting": IN_TURNS, "budget_bytes": budget, "beside": name, **medians, "times_s": times}


def budgets(lines: list[dict[str, Any]], count: int) -> list[int]:
    """From 3 % above the least reserved to what the plain run reserved, evenly."""
    reserved = {line["setting"]: line["reserved_bytes"] for line in lines if "reserved_bytes" in line}
    least = int(1.03 * min(reserved.values()))
    most = reserved.get(NONE, max(reserved.values()))
    return [least + (most - least) * place // (count - 1) for place in range(count)]


def in_a_line(line: dict[str, Any]) -> str:
    if "failed" in line:
        return f"{line['setting']}: {line['failed']}"
    if line["setting"] == KEPT_BYTES:
        forecast, probed = map(format_bytes, kept_totals(line))
        return f"{KEPT_BYTES}: {probed}, forecast {forecast}"
    if line["setting"] == IN_TURNS:
        over = line["auto_step_s"] / line["other_step_s"] - 1
        return (
            f"{IN_TURNS}, {format_bytes(line['budget_bytes'])}: auto {line['auto_step_s']:.4f} s, {line['beside']} "
            f"{line['other_step_s']:.4f} s, {over:+.1%}"
        )
    text = f"{line['setting']}: {line['step_s']:.4f} s, {format_bytes(line.get('peak_bytes', 0))}"
    if "budget_bytes" in line:
        off = line.get("peak_bytes", 0) / line["predicted_bytes"] - 1
        cold = line["cold"].get("peak_bytes", 0) / line["cold"]["predicted_bytes"] - 1
        most = format_bytes(line.get("most_reserved_bytes", 0))
        text += (
            f" of {format_bytes(line['budget_bytes'])}, reserved {most}; peak over prediction {off:+.1%}, cold "
            f"{cold:+.1%}; predicted {line['predicted_ms'] / 1e3:.4f} s; {line['mode'] or 'own schedule'}; settled in "
            f"{line['settled_s']:.1f} s"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", metavar="WORK", help="a family, or synthetic:BLOCKSxTOKENS")
    parser.add_argument("--budgets", type=int, default=5, metavar="N")
    parser.add_argument("--only", type=int, nargs="*", metavar="PLACE", help="of these budgets; the lowest is 0")
    parser.add_argument("--fixed", nargs="*", choices=(NONE, *ATTACHED), metavar="MODE", help="default: all")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="random schedules to compare with")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="steps of each setting before that")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps of each setting")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of auto and of the quickest that fits")
    parser.add_argument(
        "--pinned-once", action="store_true", help="also for auto, which then settles sooner than elsewhere"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="of families, as in FR=33")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append one JSON line a setting")
    options = parser.parse_args()
    sizes = sizes_of(options.set)
    options.more = {"offload_min_bytes": 1} if options.size == "tiny" else {}
    where = machine(options.device)

    def keep(line: dict[str, Any]) -> dict[str, Any]:
        print(in_a_line(line), flush=True)
        if options.save is not None:
            with options.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"work": work, "sizes": sizes, **line, "machine": where}) + "\n")
        return line

    for work in options.works:
        with ExitStack() as around:
            around.enter_context(kernels("no-cudnn"))
            if options.device == "cpu":
                around.enter_context(cpu_offload())
            if options.pinned_once:
                around.enter_context(pinned_once())
            task = build(condition_of(work, options.size, sizes), options.device)
            print(f"{work}:")
            schedules = drawn(task, options.random)
            with pinned_once():
                lines = [keep(line) for line in fixed(task, options)]
                lines += [keep(line) for line in at_random(task, schedules, options)]
            keep(kept(task, options))
            wanted = budgets(lines, options.budgets) if options.device == "cuda" else [2**30] * options.budgets
            for budget in wanted if options.only is None else map(wanted.__getitem__, options.only):
                line, stayed = chosen(task, budget, options)
                keep(line)
                best = quickest(lines, budget)
                if stayed is not None and best is not None:
                    with pinned_once():
                        keep(in_turns(task, stayed, budget, best["setting"], schedules, options))
        del task
        clear(options.device)


if __name__ == "__main__":
    main()
