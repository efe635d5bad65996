"""Floating-point operations, by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide import families
from lowtide.families import Stack
from lowtide.measure.build import build_model
from lowtide.measure.flops import FlopCounter, attention_flops
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL
from lowtide.runtime.resolve import resolve

devices = pytest.mark.parametrize("device", ["cpu", "meta"])


def _counted(function) -> int:
    with FlopCounter() as counter:
        function()
    return counter.total


@devices
def test_products_and_convolutions_count_and_what_is_element_by_element_does_not(device):
    a, b = torch.empty(2, 3, 5, device=device), torch.empty(2, 5, 7, device=device)
    assert _counted(lambda: a @ b) == 2 * 2 * 3 * 5 * 7
    assert _counted(lambda: F.linear(a, torch.empty(11, 5, device=device), torch.empty(11, device=device))) == (
        2 * 2 * 3 * 5 * 11
    )
    image, kernel = torch.empty(2, 3, 8, 8, device=device), torch.empty(4, 3, 3, 3, device=device)
    assert _counted(lambda: F.conv2d(image, kernel, padding=1)) == 2 * 2 * 4 * 8 * 8 * 3 * 3 * 3
    assert _counted(lambda: (a.sin() + a * 2).softmax(-1)) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "is_causal", "pairs"),
    [(3, 5, False, 15), (3, 5, True, 1 + 2 + 3), (5, 3, True, 1 + 2 + 3 + 3 + 3), (4, 4, True, 10)],
)
def test_attention_counts_the_pairs_that_it_looks_at(rows, columns, is_causal, pairs):
    query, key, value = torch.Size((2, 4, rows, 8)), torch.Size((2, 1, columns, 8)), torch.Size((2, 1, columns, 6))
    assert attention_flops(query, key, value, is_causal=is_causal) == 2 * 2 * 4 * pairs * (8 + 6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_kernel_counts_as_attention(is_causal):
    query = torch.randn(2, 4, 6, 8)
    counted = _counted(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=is_causal))
    assert counted == attention_flops(query.shape, query.shape, query.shape, is_causal=is_causal)
    assert counted == 2 * 2 * 4 * (21 if is_causal else 36) * 16


def test_a_counter_counts_what_runs_inside_it_and_not_while_it_is_paused():
    a = torch.randn(2, 2)
    with FlopCounter() as counter:
        a @ a
        assert counter.total == 16
        with counter.paused():
            a @ a
        assert counter.total == 16
        a @ a
    a @ a
    with counter.paused():
        a @ a
    assert counter.total == 32


# ---------------------------------------------------------------------- in a trace

BATCH, TOKENS, WIDTH, HEADS = 2, 5, 8, 2


class _Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(hidden).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.attn = _Attention(is_causal)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(hidden)
        return hidden + self.ff(hidden) * self.gate(hidden)


class _Model(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(is_causal) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@devices
@pytest.mark.parametrize(("is_causal", "pairs"), [(False, TOKENS * TOKENS), (True, TOKENS * (TOKENS + 1) // 2)])
def test_a_block_by_hand(device, is_causal, pairs):
    model = _Model(is_causal).to(device)
    stacks = resolve(model, (Stack("blocks", ("blocks.*",), (("ff",),), ("attn",)),))
    trace = trace_held(model, stacks, {"hidden": torch.empty(BATCH, TOKENS, WIDTH, device=device)})
    rows = BATCH * TOKENS
    kernel = 2 * 2 * BATCH * HEADS * pairs * (WIDTH // HEADS)
    side = kernel + 2 * rows * WIDTH * (3 * WIDTH) + 2 * rows * WIDTH * WIDTH
    feed_forward = 2 * rows * WIDTH * (4 * WIDTH) * 2
    gate = 2 * rows * WIDTH
    for block in trace.calls:
        assert [call.flops for call in block.outermost(KERNEL)] == [kernel]
        assert [call.flops for call in block.outermost(ATTENTION_SIDE)] == [side]
        assert [call.flops for call in block.outermost(FEED_FORWARD)] == [feed_forward]
        assert block.flops == side + feed_forward + gate


def test_a_kernel_of_another_library_counts_as_attention_whatever_it_runs(monkeypatch):
    from diffusers.models import attention_dispatch as dispatch

    registry, name = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.SAGE

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return query + (query @ key.mT @ value) * 0

    monkeypatch.setitem(registry._backends, name, kernel)
    monkeypatch.setitem(registry._constraints, name, [])
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value", "is_causal"})

    class Attention(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            heads = hidden.unflatten(-1, (HEADS, -1))  # (batch, tokens, heads, width)
            return dispatch.dispatch_attention_fn(heads, heads, heads, is_causal=True, backend=name).flatten(2)

    model = _Model(is_causal=True)
    for block in model.blocks:
        block.attn = Attention()
    stacks = resolve(model, (Stack("blocks", ("blocks.*",), (), ("attn",)),))
    trace = trace_held(model, stacks, {"hidden": torch.randn(BATCH, TOKENS, WIDTH)})
    pairs = TOKENS * (TOKENS + 1) // 2
    for block in trace.calls:
        assert [call.flops for call in block.outermost(KERNEL)] == [2 * BATCH * HEADS * pairs * 2 * (WIDTH // HEADS)]
        assert [call.flops for call in block.outermost(ATTENTION_SIDE)] == [
            call.flops for call in block.outermost(KERNEL)
        ]


@devices
def test_flux_by_hand(device):
    row = families.find("flux1")
    model = build_model(row, device=device)
    trace = trace_held(model, resolve(model, row.stacks), build_inputs(row.tiny, device=device))
    batch, image, text, width, heads = 2, 16, 6, 32, 2
    tokens = image + text

    def linear(rows: int, to: int, of: int = width) -> int:
        return 2 * batch * rows * of * to

    kernel = 4 * batch * heads * tokens**2 * (width // heads)
    modulation = 2 * linear(1, 6 * width)
    side = 4 * linear(tokens, width) + kernel  # query, key, value and output, of both streams
    feed_forwards = [linear(rows, 4 * width) + linear(rows, width, 4 * width) for rows in (image, text)]
    double, single = trace.calls[0], trace.calls[6]
    assert [call.flops for call in double.outermost(KERNEL)] == [kernel]
    assert sum(call.flops for call in double.outermost(ATTENTION_SIDE) if call.name.endswith("attn")) == side
    assert sorted(call.flops for call in double.outermost(FEED_FORWARD)) == sorted(feed_forwards)
    assert double.flops == modulation + side + sum(feed_forwards)
    assert {call.flops for call in trace.calls[:6]} == {double.flops}

    up, down = linear(tokens, 4 * width), linear(tokens, width, 5 * width)  # down from attention and feed-forward
    assert [call.flops for call in single.outermost(FEED_FORWARD)] == [up, 0, down]
    assert single.flops == linear(1, 3 * width) + 3 * linear(tokens, width) + kernel + up + down
    assert {call.flops for call in trace.calls[6:]} == {single.flops}


def test_operators_are_counted_and_those_that_autograd_records() -> None:
    frozen, trained = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with FlopCounter() as counter:
        torch.cat([frozen @ frozen, frozen + trained])
        with torch.no_grad():
            trained.exp()
    assert (counter.operators, counter.recorded) == (4, 2)
