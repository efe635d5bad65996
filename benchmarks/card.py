"""Recomputation on a CUDA card: ms a step and peak GiB of synthetic transformer blocks, beside torch's checkpoint.

bf16 blocks, width 3072, 24 heads, MLP ratio 4, batch 1, flash attention; frozen base, the input carries the gradient.
All modes take turns in every round; medians after warm-up; peak of allocated memory over one step.

Run: python benchmarks/card.py [--rounds 5] [--save]
"""

import argparse
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lowtide

RESULTS = Path(__file__).parent / "results" / "card.jsonl"
SHAPES = ((16, 1024), (16, 4096), (16, 16384), (32, 4096))
WARM_UP = 1  # rounds; every turn of a mode begins with a step that is not timed, too


class Block(nn.Module):
    def __init__(self, width: int = 3072, heads: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.out(attended)
        return x + self.ff(self.norm2(x))


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.by_torch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_torch else block(x)  # type: ignore[assignment]
        return x


def modes() -> dict[str, Callable[[Model], Any]]:
    def by_torch(model: Model) -> Any:
        model.by_torch = True

    return {
        "none": lambda model: None,
        "torch's checkpoint": by_torch,
        "torch": lambda model: lowtide.attach(model),
        "torch-ffn": lambda model: lowtide.attach(model, backend="torch-ffn"),
        "interval 2": lambda model: lowtide.attach(model, interval=2),
        "interval 2, stride 4": lambda model: lowtide.attach(model, interval=2, segment_stride=4),
    }


def measure(depth: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(depth).to(torch.bfloat16).requires_grad_(False)
        x = torch.randn(1, tokens, 3072, dtype=torch.bfloat16, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in modes()}
    peaks: dict[str, float] = {}
    recomputed: dict[str, int] = {}
    for number in range(WARM_UP + rounds):
        for name, enter in modes().items():
            handle = enter(model)
            torch.cuda.reset_peak_memory_stats()
            milliseconds = _step_ms(model, x)
            if number >= WARM_UP:
                times[name].append(milliseconds)
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            model.by_torch = False
            if handle is not None:
                recomputed[name] = handle.receipt().totals["recompute_calls"]
                handle.detach()
    return {
        name: {
            "ms": statistics.median(values),
            "spread_ms": max(values) - min(values),
            "peak_gib": peaks[name],
            "recompute_calls": recomputed.get(name, 0),
        }
        for name, values in times.items()
    }


def _step_ms(model: Model, x: torch.Tensor, repeats: int = 3) -> float:
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


def _facts() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lowtide": lowtide.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]


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
                file.write(json.dumps({**_facts(), "depth": depth, "tokens": tokens, "rows": rows}) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
