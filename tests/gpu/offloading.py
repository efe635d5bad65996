"""What the tests of offload on a card share: modes, models cut to a few layers, what gradients may differ by."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide import families
from lowtide.families import Family
from lowtide.handle import Handle
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import loss_of
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.resolve import resolve

# cuDNN's backward is wrong on Flux's joint attention (benchmarks/LOG.md): plain runs differ without bound there.
TRUSTED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # what deterministic algorithms ask for, before the first product
Gradients = dict[str, torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth, interval 2": {"backend": "unsloth", "interval": 2},
    "unsloth, interval 2, stride 4": {"backend": "unsloth", "interval": 2, "segment_stride": 4},
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "attention": {"backend": None, "offload_attention": True},
    "torch-ffn + attention": {"backend": "torch-ffn", "offload_attention": True},
    "unsloth-ffn + attention": {"backend": "unsloth-ffn", "offload_attention": True},
    "stride 4 + attention": {"interval": 2, "segment_stride": 4, "offload_attention": True},
    "torch-selective + attention": {"backend": "torch-selective", "offload_attention": True},
    "unsloth-selective": {"backend": "unsloth-selective"},
    "unsloth-selective, interval 2": {"backend": "unsloth-selective", "interval": 2},
}
EVERYTHING = ("kept+saved",)
ONE_OF_EACH = (
    "ffn+boundary+attention",
    "selective+boundary+attention",
    "ffn+boundary+saved",
    "whole+boundary",
    "kept+saved",
    "kept+attention",
    "selective+boundary",
)
SCHEDULES: dict[str, Sequence[str]] = {"everything": EVERYTHING, "one of each": ONE_OF_EACH}
ALL_MODES = [*MODES, *SCHEDULES]

_CUT: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "flux1": ({"num_layers": 3, "num_single_layers": 4}, {"H": 512, "W": 512}),
    "sd3_medium": ({"num_layers": 6}, {"B": 2, "H": 512, "W": 512}),
    "wan21_1_3b": ({"num_layers": 6}, {"FR": 17, "H": 240, "W": 416}),
    "sdxl": ({"transformer_layers_per_block": (1, 2, 2)}, {"H": 512, "W": 512}),
}
"""Real widths, few layers: what is left out of the real configuration, and smaller inputs."""
KEYS = list(_CUT)


@dataclass
class Work:
    """A model on the card and its inputs. min_bytes: small enough that its saved tensors may move."""

    model: nn.Module
    inputs: dict[str, Any]
    row: Family
    min_bytes: int

    def attach(self, mode: str) -> Handle:
        """Every buffer is pinned: with the default number of sizes some models would copy while the host waits."""
        pool: dict[str, Any] = {"offload_min_bytes": self.min_bytes, "offload_pin_memory_max_buckets": 256}
        if mode in MODES:
            return lowtide.attach(self.model, **MODES[mode], **pool)
        stacks = resolve(self.model, self.row.stacks)
        words = SCHEDULES[mode]
        cycles = {stack.name: mixed([words[i % len(words)] for i in range(len(stack.blocks))]) for stack in stacks}
        return lowtide.attach(self.model, schedule=Schedule(cycles), **pool)

    def gradients(self) -> Gradients:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with sdpa_kernel(TRUSTED):
            loss_of(self.model(**self.inputs)).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def tiny(key: str) -> Work:
    """All weights are trained, so that every linear layer saves its input."""
    row = families.find(key)
    model = build_model(row, "tiny", dtype=torch.bfloat16).cuda()
    return Work(model, build_inputs(row.tiny, torch.bfloat16, device="cuda"), row, min_bytes=256)


def cut(key: str) -> Work:
    """Real widths, and a LoRA on the attention projections."""
    row = families.find(key)
    less, over = _CUT[key]
    row = replace(row, real=replace(row.real, config={**row.real.config, **less}))
    model: Any = build_model(row, "real", device="cuda", dtype=torch.bfloat16).to("cuda")
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights=False, target_modules=targets))
    return Work(model, build_inputs(row.real, torch.bfloat16, over=over, device="cuda"), row, min_bytes=2**16)


SIZES: dict[str, Callable[[str], Work]] = {"tiny": tiny, "cut": cut}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one is finite."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a.float() - b.float()).nan_to_num(0.0, 0.0, 0.0).abs().max())


def spread(runs: Sequence[Gradients]) -> dict[str, float]:
    """Per parameter, the largest difference over all pairs of runs of one and the same thing.

    Five pairs would be exceeded by one of the six hundred comparisons of a model by chance, plain runs' own included.
    """
    pairs = list(itertools.combinations(runs, 2))
    return {name: max(difference(a[name], b[name]) for a, b in pairs) for name in runs[0]}


def nearest(found: torch.Tensor, name: str, runs: Sequence[Gradients]) -> float:
    """How far the gradient is from the nearest of the runs: one of them alone may lie at the edge of the spread."""
    return min(difference(found, run[name]) for run in runs)
