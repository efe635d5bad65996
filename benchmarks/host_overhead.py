"""Host cost of recomputation: microseconds of CPU work that each way adds to one block, forward and backward.

Blocks are so small that arithmetic hardly counts; what is left is what a checkpoint does around a block. "Added" is
the cost over plain; it contains the block's second forward, which every checkpoint pays. "/ torch adds" compares it
with what torch's non-reentrant checkpoint adds, measured in the same rounds. Times are CPU time of this process with
one thread (work of others on the machine counts only through shared caches); all rows take turns; medians.

Offload on a card: --device cuda. CPU time then is that of issuing the work, backward's own thread included; "lag" is
how much longer the card took, so a large one means that the card, not the host, was measured. On the CPU offload copies
within CPU memory and waits for it (lowtide.testing.cpu_offload), which counts.

Run: python benchmarks/host_overhead.py [--device cuda] [--rounds 200] [--save]
     python benchmarks/host_overhead.py --profile 'lowtide unsloth'
"""

import argparse
import copy
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.bench.provenance import provenance
from lowtide.testing import cpu_offload

RESULTS = Path(__file__).parent / "results" / "host_overhead.jsonl"
ATTACHED: dict[str, dict[str, Any]] = {
    "lowtide interval 1": {"interval": 1},
    "lowtide interval 2": {"interval": 2},
    "lowtide unsloth": {"backend": "unsloth", "offload_min_bytes": 1},
    "lowtide attention offload": {"backend": None, "offload_attention": True, "offload_min_bytes": 1},
    "lowtide torch-selective": {"backend": "torch-selective"},
    "lowtide unsloth-selective": {"backend": "unsloth-selective", "offload_min_bytes": 1},
}
GOALS = {
    "lowtide interval 1": 0.7,
    "lowtide interval 2": 0.7,
    "lowtide unsloth": 1.2,
    "lowtide attention offload": 1.2,
}
Caller = Callable[..., Any]


class TinyAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


class TinyBlock(nn.Module):
    """A pre-norm attention and feed-forward block, 16 tokens of width 32."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = TinyAttention(width, heads)
        self.ff1, self.ff2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
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
    rows: dict[str, tuple[nn.Module, Caller]] = {
        "plain": (copy.deepcopy(stack), _plain),
        "torch checkpoint": (copy.deepcopy(stack), _with_torch),
        "lowtide.checkpoint": (copy.deepcopy(stack), _with_region),
    }
    for name, settings in ATTACHED.items():
        model = copy.deepcopy(stack)
        lowtide.attach(model, **settings)
        rows[name] = (model, _plain)
    return rows


def measure(
    rows: dict[str, tuple[nn.Module, Caller]], inputs: tuple[Any, ...], rounds: int, depth: int
) -> dict[str, tuple[float, float]]:
    """Median CPU time in µs of forward and backward, a block, of each row; and by how much the device came later."""
    times_us: dict[str, list[float]] = {name: [] for name in rows}
    lags_us: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(5):
        for model, call in rows.values():
            model(call, *inputs).backward()
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for name, (model, call) in rows.items():
            _synchronize(inputs)
            begin_ns = time.process_time_ns()
            model(call, *inputs).backward()
            times_us[name].append((time.process_time_ns() - begin_ns) / 1e3 / depth)
            issued_ns = time.perf_counter_ns()
            _synchronize(inputs)
            lags_us[name].append((time.perf_counter_ns() - issued_ns) / 1e3 / depth)
        if number % 50 == 49:
            gc.collect()
    gc.enable()
    return {name: (statistics.median(times_us[name]), statistics.median(lags_us[name])) for name in rows}


def _synchronize(inputs: tuple[Any, ...]) -> None:
    if inputs[0].device.type == "cuda":
        torch.cuda.synchronize()


def report(title: str, medians_us: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    plain_us = medians_us["plain"][0]
    torch_us = medians_us["torch checkpoint"][0]
    lines = []
    print(f"\n{title}: µs a block, forward and backward")
    print(f"  {'':<26} {'total':>8} {'added':>8} {'/ torch adds':>13} {'/ torch':>8} {'lag':>7}")
    for name, (total_us, lag_us) in medians_us.items():
        added_us, ratio = total_us - plain_us, (total_us - plain_us) / (torch_us - plain_us)
        goal = GOALS.get(name)
        mark = "" if goal is None else f"  goal of {goal} met" if ratio <= goal else f"  above the goal of {goal}"
        print(
            f"  {name:<26} {total_us:8.1f} {added_us:8.1f} {ratio:13.2f} {total_us / torch_us:8.2f} {lag_us:7.1f}{mark}"
        )
        lines.append(
            {"row": name, "total_us": total_us, "added_us": added_us, "ratio_to_torch": ratio, "lag_us": lag_us}
        )
    return lines


def profile_row(model: nn.Module, call: Caller, inputs: tuple[Any, ...], rounds: int) -> None:
    """Where the host's time goes. Backward on a card runs on a thread that the profiler does not see."""
    profiler = cProfile.Profile()
    for number in range(rounds + 5):
        if number == 5:
            profiler.enable()
        model(call, *inputs).backward()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def to_device(value: Any, device: str) -> Any:
    return tuple(to_device(item, device) for item in value) if isinstance(value, tuple) else value.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of all rows (default 200)")
    parser.add_argument("--depth", type=int, default=16, help="blocks in the stack (default 16)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--profile", metavar="ROW", help="no table: where one row's host time goes")
    parser.add_argument("--save", nargs="?", const=RESULTS, type=Path, help=f"append results (default {RESULTS.name})")
    parser.add_argument("--commit", help="commit of the tree, where git is not there to say it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for title, (build, make_inputs) in STACKS.items():
        inputs = to_device(make_inputs(), options.device)
        with cpu_offload() if options.device == "cpu" else nullcontext():
            rows = variants(build(options.depth).to(options.device))
            if options.profile:
                profile_row(*rows[options.profile], inputs, options.rounds)
                continue
            medians_us = measure(rows, inputs, options.rounds, options.depth)
        results[title] = report(title, medians_us)
    if options.save and results:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        facts = {**provenance(options.device, options.commit), "threads": torch.get_num_threads()}
        line = {**facts, "device": options.device, "rounds": options.rounds, "depth": options.depth, "results": results}
        with options.save.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"\nappended to {options.save}")


if __name__ == "__main__":
    main()
