"""A LoRA where benchmarks put it, on every projection of a block's softmax attention, or on the layers of a pattern."""

from collections.abc import Iterator, Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lowtide.runtime.resolve import ResolvedStack, child


def add_lora(
    model: nn.Module,
    stacks: Sequence[ResolvedStack],
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    targets: str | None = None,
) -> None:
    """Inject it into a frozen model, on all linear layers of a block that has no softmax attention.

    dtype: of its weights. targets: regular expression over module paths: on these layers instead. LoRA: Hu et al.,
    arXiv:2106.09685.
    """
    chosen = targets or list(dict.fromkeys(_attention(stacks)))
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=chosen)
    inject_adapter_in_model(config, model)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)


def _attention(stacks: Sequence[ResolvedStack]) -> Iterator[str]:
    for stack in stacks:
        for path, block in stack.blocks:
            yield from _targets(stack, path, block)


def _targets(stack: ResolvedStack, path: str, block: nn.Module) -> Iterator[str]:
    sides = [(side, module) for side in stack.row.attention if (module := child(block, side)) is not None]
    for side, module in sides or [("", block)]:
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear):
                yield ".".join(filter(None, (path, side, name)))
