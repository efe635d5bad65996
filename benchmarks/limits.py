"""Schedules held to limits of PyTorch's allocator: how close to what its tensors take a step becomes slow, and where it
runs out of memory. On a card.

    PYTORCH_ALLOC_CONF=expandable_segments:True,large_segment_size_mb:12 \\
        python benchmarks/limits.py wan21_1_3b synthetic:16x4096 --set FR=17 --save results/limits.jsonl

Each schedule runs without a limit first. Limits are so many MiB above its peak there. ``--filled``: at the begin of
each step all that may be taken is taken in one piece, and left to the allocator: it need not ask the driver for more,
which it refuses by the whole of what a tensor needs, though part of that may be there.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pinned_cache import pinned_once
from planner import clear, condition_of, measure

import lowtide
from lowtide.allocator import VARIABLES
from lowtide.auto.budget import Limit, page_bytes
from lowtide.bench.attention import kernels
from lowtide.bench.provenance import machine
from lowtide.bench.works import Task, build
from lowtide.cli.options import sizes_of
from lowtide.plan.schedule import Schedule, mixed
from lowtide.units import format_bytes

DEVICE = torch.device("cuda:0")
MIB = 2**20
SMALL_BYTES = 24 * MIB
"""Left to tensors of up to a MiB, which have segments of their own."""
WARM_UP, STEPS = 2, 5
SCHEDULES: Mapping[str, Callable[[int], Sequence[str]]] = {
    "selective": lambda depth: ["selective+attention+boundary"] * (depth - 1) + ["kept"],
    "whole": lambda depth: ["whole+boundary"] * (depth - 1) + ["kept"],
    "ffn": lambda depth: ["ffn+attention"] * (depth // 2) + ["selective"] * (depth - depth // 2),
    "saved": lambda depth: ["kept+saved"] * depth,
}
"""Words of a stack, by its depth."""


def fill(limit_bytes: int) -> None:
    """Take what may be taken, and give it back to the allocator's cache."""
    held = []
    while (room_bytes := limit_bytes - torch.cuda.memory_reserved() - SMALL_BYTES) >= page_bytes():
        try:
            held.append(torch.empty(room_bytes, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            break


class Filling:
    """A task whose every step begins with ``fill``."""

    def __init__(self, task: Task, limit_bytes: int) -> None:
        self._task, self._limit_bytes = task, limit_bytes

    def step(self) -> Any:
        fill(self._limit_bytes)
        return self._task.step()


def held_to(task: Task, schedule: Schedule, limit_bytes: int | None, filled: bool) -> dict[str, Any]:
    """What its steps took."""
    clear("cuda")
    limit = None if limit_bytes is None else Limit(DEVICE, limit_bytes + page_bytes())
    run: Any = task if limit_bytes is None or not filled else Filling(task, limit_bytes)
    try:
        with lowtide.attach(task.model, schedule=schedule):
            return measure(run, "cuda", WARM_UP, STEPS)
    except torch.OutOfMemoryError:
        for tensor in task.trained:
            tensor.grad = None
        return {"failed": "out of memory"}
    finally:
        if limit is not None:
            limit.lift()


def lines_of(
    task: Task, names: Sequence[str], in_flight: Sequence[int | None], beyond: Sequence[int], fillings: Sequence[bool]
) -> Iterator[dict[str, Any]]:
    for name, in_flight_mib in product(names, in_flight):
        stacks = {stack.name: mixed(SCHEDULES[name](len(stack.blocks))) for stack in task.stacks}
        most_bytes = None if in_flight_mib is None else in_flight_mib * MIB
        schedule = Schedule(stacks, most_bytes, most_bytes)
        what = {"schedule": name, "in_flight_mib": in_flight_mib}
        free = held_to(task, schedule, None, False)
        yield {**what, "beyond_mib": None, "filled": False, **free}
        for more, filled in product(beyond, fillings) if "peak_bytes" in free else ():
            found = held_to(task, schedule, free["peak_bytes"] + more * MIB, filled)
            yield {**what, "beyond_mib": more, "filled": filled, **found}


def in_a_line(line: Mapping[str, Any]) -> str:
    where = "no limit" if line["beyond_mib"] is None else f"peak + {line['beyond_mib']} MiB"
    in_flight = "" if line["in_flight_mib"] is None else f", {line['in_flight_mib']} MiB in flight"
    name = f"{line['schedule']}{in_flight}, {where}{', filled' * line['filled']}"
    if "failed" in line:
        return f"{name}: {line['failed']}"
    sizes = f"{format_bytes(line['peak_bytes'])}, reserved {format_bytes(line['reserved_bytes'])}"
    return f"{name}: {line['step_s']:.4f} s, {sizes}, {line['num_alloc_retries']} times given back"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", metavar="WORK", help="a family, or synthetic:BLOCKSxTOKENS")
    parser.add_argument("--beyond", type=int, nargs="+", default=[50, 80, 110, 140, 170, 200], metavar="MIB")
    parser.add_argument("--filled", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=tuple(SCHEDULES))
    parser.add_argument(
        "--in-flight",
        type=lambda word: None if word == "block" else int(word),
        nargs="+",
        default=[None],
        metavar="MIB",
        help="each way; block (the default): what the block that moves most moves",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="of families, as in FR=33")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append one JSON line a schedule and limit")
    options = parser.parse_args()
    sizes, where = sizes_of(options.set), machine("cuda")
    settings = next((os.environ[name] for name in VARIABLES if name in os.environ), None)
    fillings = {"no": (False,), "yes": (True,), "both": (False, True)}[options.filled]
    for work in options.works:
        of_work = {} if work.startswith("synthetic:") else sizes
        with kernels("no-cudnn"), pinned_once():
            task = build(condition_of(work, "real", of_work), "cuda")
            print(f"{work}:")
            for line in lines_of(task, options.schedules, options.in_flight, options.beyond, fillings):
                print(in_a_line(line), flush=True)
                if options.save is not None:
                    more = {"work": work, "sizes": of_work, **line, "allocator": settings, "machine": where}
                    with options.save.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(more) + "\n")
        del task
        clear("cuda")


if __name__ == "__main__":
    main()
