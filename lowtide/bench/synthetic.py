"""Synthetic transformer blocks, as benchmarks of other projects use them: pre-norm attention, pre-norm feed-forward.

Width 3072, 24 heads, MLP ratio 4 (facts of the figures to beat); lowtide finds the stack and both sides by structure.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 3072
HEADS = 24


class Attention(nn.Module):
    """Fused q, k and v; (batch, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        return self.out(attended)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Synthetic(nn.Module):
    """``depth`` blocks in a row: (batch, tokens, width) to the same."""

    def __init__(self, depth: int, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
