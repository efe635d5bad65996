"""Recomputation on a CUDA card: ms a step and peak GiB of synthetic transformer blocks, beside torch's checkpoint.

bf16 blocks, width 3072, 24 heads, MLP ratio 4, batch 1, flash attention; frozen base, the input carries the gradient.
All modes take turns in every round; medians after warm-up; peak of allocated memory over one step.

Run: python benchmarks/card.py [--rounds 5] [--save]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.bench.provenance import provenance
from lowtide.bench.synthetic import WIDTH, Synthetic
from lowtide.bench.torch_checkpoint import checkpointed

RESULTS = Path(__file__).parent / "results" / "card.jsonl"
SHAPES = ((16, 1024), (16, 4096), (16, 16384), (32, 4096))
WARM_UP = 1  # rounds; every turn of a mode begins with a step that is not timed, too


def modes() -> dict[str, Callable[[Synthetic], AbstractContextManager[Any]]]:
    return {
        "none": lambda model: nullcontext(),
        "torch's checkpoint": lambda model: checkpointed(model.blocks),
        "torch": lambda model: lowtide.attach(model),
        "torch-ffn": lambda model: lowtide.attach(model, backend="torch-ffn"),
        "interval 2": lambda model: lowtide.attach(model, interval=2),
        "interval 2, stride 4": lambda model: lowtide.attach(model, interval=2, segment_stride=4),
    }


def measure(depth: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Synthetic(depth).to(torch.bfloat16).requires_grad_(False)
        x = torch.randn(1, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in modes()}
    peaks: dict[str, float] = {}
    recomputed: dict[str, int] = {}
    for number in range(WARM_UP + rounds):
        for name, enter in modes().items():
            with enter(model) as handle:
                torch.cuda.reset_peak_memory_stats()
                milliseconds = _step_ms(model, x)
                if handle is not None:
                    recomputed[name] = handle.receipt().totals["recompute_calls"]
            if number >= WARM_UP:
                times[name].append(milliseconds)
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    return {
        name: {
            "ms": statistics.median(values),
            "spread_ms": max(values) - min(values),
            "peak_gib": peaks[name],
            "recompute_calls": recomputed.get(name, 0),
        }
        for name, values in times.items()
    }


def _step_ms(model: Synthetic, x: torch.Tensor, repeats: int = 3) -> float:
    """Milliseconds of one step, over ``repeats``; the first of a mode (attach, byte counting) is not timed."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    gradient = torch.ones_like(x)
    for number in range(repeats + 1):
        if number == 1:
            start.record()
        x.grad = None
        model(x).backward(gradient)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"append the results to {RESULTS.name}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode (default 5)")
    options = parser.parse_args()
    for depth, tokens in SHAPES:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            rows = measure(depth, tokens, options.rounds)
        print(f"\n{depth} blocks x {tokens} tokens\n{'':24}{'ms':>9}{'x none':>9}{'peak GiB':>10}{'recomputed':>12}")
        for name, row in rows.items():
            ratio = row["ms"] / rows["none"]["ms"]
            print(f"{name:24}{row['ms']:9.1f}{ratio:9.3f}{row['peak_gib']:10.2f}{row['recompute_calls']:12}")
        if options.save:
            with RESULTS.open("a") as file:
                file.write(json.dumps({**provenance(), "depth": depth, "tokens": tokens, "rows": rows}) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
