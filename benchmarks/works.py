"""What offload is measured on: synthetic blocks and real models with random weights, as one step of training each.

Weights are bfloat16 and frozen. Synthetic blocks get the gradient of their input; real models (diffusers classes in the
real configuration of their family's row) train a LoRA of rank 16 on to_q, to_k, to_v and to_out.0. Backward starts from
a fixed gradient of the output, so that neither a loss nor an optimizer is part of the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.nn.attention import SDPBackend

from lowtide import families
from lowtide.bench.synthetic import HEADS, WIDTH, Synthetic
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.runtime.resolve import ResolvedStack, resolve

FLASH = (SDPBackend.FLASH_ATTENTION,)
NO_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_LORA = LoraConfig(r=16, lora_alpha=16, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
_TINY_WIDTH, _TINY_HEADS, _TINY_DEPTH, _TINY_TOKENS = 32, 2, 6, 16


@dataclass(frozen=True)
class Task:
    """A built model and one step of it.

    leaves: what gets a gradient, by name. gradient: of the output, fixed.
    """

    model: nn.Module
    stacks: list[ResolvedStack]
    run: Callable[[], torch.Tensor]
    gradient: torch.Tensor
    leaves: Mapping[str, torch.Tensor]

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for stack in self.stacks for _, block in stack.blocks]

    def step(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None
        self.run().backward(self.gradient)


@dataclass(frozen=True)
class Work:
    """A row of the benchmark.

    build: (device, tiny) to a Task; tiny: the same in a size that a CPU runs in a moment. kernels: of attention that
    may be used. rounds and steps: visits of each mode, and timed steps in each visit.
    """

    title: str
    build: Callable[[str, bool], Task]
    kernels: tuple[SDPBackend, ...]
    rounds: int
    steps: int


def synthetic(depth: int, tokens: int, rounds: int, steps: int) -> Work:
    def build(device: str, tiny: bool) -> Task:
        size = (_TINY_DEPTH, _TINY_WIDTH, _TINY_HEADS) if tiny else (depth, WIDTH, HEADS)
        torch.manual_seed(0)
        with torch.device(device):
            model = Synthetic(*size).to(torch.bfloat16).requires_grad_(False)
            x = torch.randn(1, _TINY_TOKENS if tiny else tokens, size[1], dtype=torch.bfloat16, requires_grad=True)
        return Task(model, resolve(model, None), lambda: model(x), torch.ones_like(x), {"input": x})

    return Work(f"{depth} blocks x {tokens} tokens, width {WIDTH}", build, FLASH, rounds, steps)


def family(key: str, over: Mapping[str, int], rounds: int, steps: int, kernels: tuple[SDPBackend, ...]) -> Work:
    """over: the sizes of the input that differ from the row's."""
    row = families.find(key)
    sizes = ", ".join(f"{name} {value}" for name, value in {**row.real.vars, **over}.items() if name in _TOLD)

    def build(device: str, tiny: bool) -> Task:
        model: Any = build_model(row, "tiny" if tiny else "real", device=device, dtype=torch.bfloat16)
        model.to(device).requires_grad_(False)
        model.add_adapter(_LORA)
        leaves = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for weight in leaves.values():
            weight.data = weight.data.to(torch.bfloat16)
        inputs = build_inputs(row.tiny if tiny else row.real, torch.bfloat16, over={} if tiny else over, device=device)

        def run() -> torch.Tensor:
            return model(**inputs, return_dict=False)[0]

        with torch.no_grad():
            gradient = torch.randn_like(run())
        return Task(model, resolve(model, row.stacks), run, gradient, leaves)

    return Work(f"{row.title}, {sizes}, LoRA 16", build, kernels, rounds, steps)


_TOLD = ("B", "FR", "H", "W")
WORKS: dict[str, Work] = {
    "16x16384": synthetic(16, 16384, rounds=2, steps=3),
    "16x4096": synthetic(16, 4096, rounds=3, steps=5),
    "16x1024": synthetic(16, 1024, rounds=5, steps=8),
    "wan": family("wan21_1_3b", {}, rounds=1, steps=3, kernels=NO_CUDNN),
    "sd3": family("sd3_medium", {"B": 4}, rounds=2, steps=4, kernels=NO_CUDNN),
    "flux": family("flux1", {}, rounds=2, steps=3, kernels=NO_CUDNN),
    "sdxl": family("sdxl", {}, rounds=1, steps=4, kernels=NO_CUDNN),
}
