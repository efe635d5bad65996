"""Selective blocks: small ones with attention, a count of the kernels that run, the comparison with a plain run."""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.plan.schedule import SELECTIVE, Schedule, StackSchedule, whole_blocks
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.resolve import resolve
from tests.runtime.toys import Chain, assert_equal, step

SDPA = F.scaled_dot_product_attention
KERNELS = {"_scaled_dot_product_flash_attention_for_cpu": "fused", "_safe_softmax": "math", "_softmax": "math"}
TOKENS, WIDTH, HEADS = 12, 32, 4


class CountsAttention(TorchDispatchMode):
    """Counts the forward attention kernels that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KERNELS.get(func.overloadpacket.__name__)
        if kind is not None:
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class Attention(nn.Module):
    """Pre-norm attention and feed-forward; ``attend`` is the attention itself."""

    def __init__(self, attend: Callable[..., torch.Tensor] | None = None, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        head = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), *(nn.Linear(WIDTH, kv_heads * head) for _ in range(2))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.attend = attend or (lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a counter would be compiled again with every value
            self.calls += 1
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.down(F.gelu(self.up(x)))


def chain(attend: Callable[..., torch.Tensor] | None = None, depth: int = 3, **options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain([Attention(attend, **options) for _ in range(depth)])


def block(model: Chain) -> Attention:
    """The one in the middle."""
    return cast(Attention, model.blocks[1])


def inputs(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def selective(depth: int, interval: int = 1) -> StackSchedule:
    return whole_blocks(depth, interval, treatment=SELECTIVE)


def attach(model: nn.Module, interval: int = 1) -> lowtide.Handle:
    stacks = {stack.name: selective(len(stack.blocks), interval) for stack in resolve(model, None)}
    return lowtide.attach(model, schedule=Schedule(stacks))


def assert_selective(
    model: Chain, run: Callable[[], torch.Tensor], attention: int | None = None, interval: int = 1
) -> Receipt:
    """Bit-equal to plain, with ``attention`` kernels run in forward and backward together: default as plain has."""
    plain_mode, mode = CountsAttention(), CountsAttention()
    with plain_mode:
        plain = step(model, run)
    with attach(model, interval) as handle:
        with mode:
            assert_equal(plain, step(model, run))
        receipt = handle.receipt()
    assert mode.total == (plain_mode.total if attention is None else attention)
    assert F.scaled_dot_product_attention is SDPA
    assert all(block.recompute_calls == 1 for block in receipt.blocks)
    return receipt


def reasons(receipt: Receipt) -> set[str]:
    return {note.reason for note in receipt.fallbacks}


def sdpa_with(**kwargs: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs)


def packed_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Contiguous arguments, of which the math kernel makes the fewest copies."""
    return F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), **kwargs)
