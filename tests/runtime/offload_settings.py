"""Settings that move something, a model for all of them, and the comparison with a plain run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.receipt import Receipt
from tests.runtime.toys import Chain, assert_equal, step

DEPTH = 6


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2))


class Transformer(nn.Module):
    """A block with an attention and a feed-forward side that structure shows; counts its forwards."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def transformers(depth: int = DEPTH, dropout: float = 0.1) -> Chain:
    torch.manual_seed(0)
    return Chain([Transformer(dropout=dropout) for _ in range(depth)])


def of_words(*words: str) -> dict[str, Any]:
    """A schedule from the words of the first blocks, repeated over a stack of DEPTH."""
    stack = mixed([words[index % len(words)] for index in range(DEPTH)])
    return {"backend": None, "schedule": Schedule({"blocks": stack})}


WHOLE: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth in twos": {"backend": "unsloth", "interval": 2},
    "unsloth in threes": {"backend": "unsloth", "interval": 3},
    "unsloth, two in four": {"backend": "unsloth", "interval": 2, "segment_stride": 4},
}
ATTENDED: dict[str, dict[str, Any]] = {
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "attention": {"backend": None, "offload_attention": True},
    "attention and ffn": {"backend": "torch-ffn", "offload_attention": True},
    "attention and unsloth-ffn": {"backend": "unsloth-ffn", "offload_attention": True, "interval": 2},
    "attention between segments": {"backend": "unsloth", "interval": 2, "segment_stride": 4, "offload_attention": True},
    "unsloth-selective": {"backend": "unsloth-selective", "interval": 2},
}
MIXED: dict[str, dict[str, Any]] = {
    "all that is saved": of_words("kept+saved"),
    "whole and kept": of_words("whole+boundary", "kept+saved", "kept"),
    "each its own": of_words("kept+saved", "ffn+boundary+attention", "whole+boundary", "selective+boundary+attention"),
    "ffn with the rest": of_words("ffn+saved", "ffn+attention"),
}
PLAIN_BLOCKS = {**WHOLE, "all that is saved": MIXED["all that is saved"], "whole and kept": MIXED["whole and kept"]}
ALL = {**WHOLE, **ATTENDED, **MIXED}


def settings(table: dict[str, dict[str, Any]]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("setting", table.values(), ids=table.keys())


def attached(model: nn.Module, **options: Any) -> lowtide.Handle:
    return lowtide.attach(model, **{"offload_min_bytes": 0, **options})


def sized(options: dict[str, Any], depth: int) -> dict[str, Any]:
    """The setting for a stack of another depth."""
    schedule = options.get("schedule")
    if schedule is None:
        return options
    stack = schedule.stacks["blocks"]
    words = ["+".join((stack.treatments[i % DEPTH], *sorted(stack.moves[i % DEPTH]))) for i in range(depth)]
    return {**options, "schedule": Schedule({"blocks": mixed(words)})}


def assert_same_and_moved(model: Any, run: Callable[[], torch.Tensor], **options: Any) -> Receipt:
    """Three steps, each with a plain run's gradients bit for bit; nothing is left after the graph or the handle."""
    options = sized(options, len(model.blocks))
    plain = step(model, run)
    handle = attached(model, **options)
    store = handle._store
    assert store is not None
    for _ in range(3):
        assert_equal(plain, step(model, run))
        receipt = handle.receipt()
        assert receipt.copies.d2h_bytes > 0
        assert receipt.copies.pool["in_use_bytes"] == 0
        assert store.in_flight_bytes == store.ahead_bytes == 0
    handle.detach()
    assert store.pool.total_bytes == 0
    assert_equal(plain, step(model, run))
    return receipt
