"""Host cost of recomputation: microseconds of CPU work that each way adds to one block, forward and backward.

Blocks are so small that arithmetic hardly counts; what is left is what a checkpoint does around a block. "Added" is
the cost over plain; it contains the block's second forward, which every checkpoint pays. "/ torch adds" compares it
with what torch's non-reentrant checkpoint adds, measured in the same rounds. Times are CPU time of this process with
one thread (work of others on the machine counts only through shared caches); all rows take turns; medians.

Run: python benchmarks/host_overhead.py [--rounds 200] [--save]
"""

import argparse
import copy
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide

RESULTS = Path(__file__).parent / "results" / "host_overhead.jsonl"
GOAL = 0.7
GOAL_ROWS = ("lowtide interval 1", "lowtide interval 2")
Caller = Callable[..., Any]


class TinyBlock(nn.Module):
    """A pre-norm attention and feed-forward block, 16 tokens of width 32."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.ff1, self.ff2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(attended)
        return x + self.ff2(F.gelu(self.ff1(self.norm2(x))))


class TinyStack(nn.Module):
    """``depth`` TinyBlocks, each run through ``call``."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(depth))

    def forward(self, call: Caller, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = call(block, x)
        return x.sum()


class FluxStack(nn.Module):
    """``depth`` of diffusers' FluxTransformerBlock, called as Flux does: 16 image and 8 text tokens of width 32."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

        self.blocks = nn.ModuleList(FluxTransformerBlock(32, 2, 16) for _ in range(depth))

    def forward(self, call: Caller, x: torch.Tensor, text: torch.Tensor, *more: Any) -> torch.Tensor:
        temb, rotary = more
        for block in self.blocks:
            text, x = call(block, hidden_states=x, encoder_hidden_states=text, temb=temb, image_rotary_emb=rotary)
        return x.sum() + text.sum()


def tiny_inputs() -> tuple[Any, ...]:
    return (torch.randn(1, 16, 32),)


def flux_inputs() -> tuple[Any, ...]:
    angles = torch.randn(24, 16)
    return torch.randn(1, 16, 32), torch.randn(1, 8, 32), torch.randn(1, 32), (angles.cos(), angles.sin())


STACKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "attention + MLP": (TinyStack, tiny_inputs),
    "FluxTransformerBlock": (FluxStack, flux_inputs),
}


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


def _with_torch(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(block, *args, use_reentrant=False, **kwargs)


def _with_region(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return lowtide.checkpoint(block, *args, **kwargs)


def variants(stack: nn.Module) -> dict[str, tuple[nn.Module, Caller]]:
    """The rows: a model of its own for each, all with the same weights, and how it calls a block."""
    rows = {
        "plain": (copy.deepcopy(stack), _plain),
        "torch checkpoint": (copy.deepcopy(stack), _with_torch),
        "lowtide interval 1": (copy.deepcopy(stack), _plain),
        "lowtide interval 2": (copy.deepcopy(stack), _plain),
        "lowtide.checkpoint": (copy.deepcopy(stack), _with_region),
    }
    lowtide.attach(rows["lowtide interval 1"][0], interval=1)
    lowtide.attach(rows["lowtide interval 2"][0], interval=2)
    return rows


def measure(
    rows: dict[str, tuple[nn.Module, Caller]], inputs: tuple[Any, ...], rounds: int, depth: int
) -> dict[str, float]:
    """Median CPU time in µs of forward and backward, a block, of each row."""
    times_us: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(5):
        for model, call in rows.values():
            model(call, *inputs).backward()
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for name, (model, call) in rows.items():
            begin_ns = time.process_time_ns()
            model(call, *inputs).backward()
            times_us[name].append((time.process_time_ns() - begin_ns) / 1e3 / depth)
        if number % 50 == 49:
            gc.collect()
    gc.enable()
    return {name: statistics.median(series) for name, series in times_us.items()}


def report(title: str, medians_us: dict[str, float]) -> list[dict[str, Any]]:
    plain_us = medians_us["plain"]
    torch_adds_us = medians_us["torch checkpoint"] - plain_us
    lines = []
    print(f"\n{title}: µs a block, forward and backward")
    print(f"  {'':<20} {'total':>8} {'added':>8} {'/ torch adds':>13}")
    for name, total_us in medians_us.items():
        added_us, ratio = total_us - plain_us, (total_us - plain_us) / torch_adds_us
        mark = ("  goal met" if ratio <= GOAL else f"  above the goal of {GOAL}") if name in GOAL_ROWS else ""
        print(f"  {name:<20} {total_us:8.1f} {added_us:8.1f} {ratio:13.2f}{mark}")
        lines.append({"row": name, "total_us": total_us, "added_us": added_us, "ratio_to_torch": ratio})
    return lines


def provenance() -> dict[str, Any]:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version()}
    for package in ("torch", "diffusers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or None,
        "versions": versions,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of all rows (default 200)")
    parser.add_argument("--depth", type=int, default=16, help="blocks in the stack (default 16)")
    parser.add_argument("--save", action="store_true", help=f"append the result to {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for title, (build, make_inputs) in STACKS.items():
        medians_us = measure(variants(build(options.depth)), make_inputs(), options.rounds, options.depth)
        results[title] = report(title, medians_us)
    if options.save:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        line = {**provenance(), "rounds": options.rounds, "depth": options.depth, "results": results}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"\nappended to {RESULTS}")


if __name__ == "__main__":
    main()
