"""What ``bench.host`` measures: blocks so small that arithmetic hardly counts, and the ways in which they are run."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide

PLAIN, TORCH = "plain", "torch checkpoint"
ATTACHED: Mapping[str, Mapping[str, Any]] = {
    "lowtide interval 1": {"interval": 1},
    "lowtide interval 2": {"interval": 2},
    "lowtide unsloth": {"backend": "unsloth", "offload_min_bytes": 1},
    "lowtide attention offload": {"backend": None, "offload_attention": True, "offload_min_bytes": 1},
    "lowtide torch-selective": {"backend": "torch-selective"},
    "lowtide unsloth-selective": {"backend": "unsloth-selective", "offload_min_bytes": 1},
}
"""Arguments of ``lowtide.attach`` by row."""

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


def stacks(depth: int, device: str) -> Iterator[tuple[str, nn.Module, tuple[Any, ...]]]:
    """Title, stack and the inputs of its forward after ``call``, of each block that is measured."""
    with torch.device(device):
        tiny, tokens = TinyStack(depth), torch.randn(1, 16, 32)
    yield "attention + MLP", tiny, (tokens,)  # outside of the device's context, which costs each operator time
    with torch.device(device):
        flux, angles = FluxStack(depth), torch.randn(24, 16)
        inputs = torch.randn(1, 16, 32), torch.randn(1, 8, 32), torch.randn(1, 32), (angles.cos(), angles.sin())
    yield "FluxTransformerBlock", flux, inputs


def rows(stack: nn.Module) -> dict[str, tuple[nn.Module, Caller]]:
    """By name a model of its own, all with the same weights, and how it calls a block."""
    found: dict[str, tuple[nn.Module, Caller]] = {
        PLAIN: (copy.deepcopy(stack), _plain),
        TORCH: (copy.deepcopy(stack), _with_torch),
        "lowtide.checkpoint": (copy.deepcopy(stack), _with_region),
    }
    for name, settings in ATTACHED.items():
        model = copy.deepcopy(stack)
        lowtide.attach(model, **settings)
        found[name] = (model, _plain)
    return found


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


def _with_torch(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(block, *args, use_reentrant=False, **kwargs)


def _with_region(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return lowtide.checkpoint(block, *args, **kwargs)
