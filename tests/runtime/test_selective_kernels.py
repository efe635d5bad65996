"""Selective blocks keep what their attention kernel gave out: attention runs once a step, gradients stay bit-equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide import families
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, run_step
from lowtide.plan.schedule import Schedule
from lowtide.runtime.resolve import resolve
from tests.runtime.attention import (
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    CountsAttention,
    assert_selective,
    attach,
    chain,
    inputs,
    packed_heads,
    reasons,
    sdpa_with,
    selective,
)
from tests.runtime.toys import Chain, assert_equal, step

# ---------------------------------------------------------------------- families


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("key", ["flux1", "sd3", "wan2.1t2v1.3b", "pixart", "sdxl"])
def test_families_are_bit_equal_and_run_attention_once(key: str, interval: int) -> None:
    row = families.find(key)
    model, kwargs = build_model(row, "tiny"), build_inputs(row.tiny)
    with CountsAttention() as plain_mode:
        plain = run_step(model, kwargs, 11)
    stacks = resolve(model, row.stacks)
    schedule = Schedule({stack.name: selective(len(stack.blocks), interval) for stack in stacks})
    with lowtide.attach(model, interval=interval) as handle, CountsAttention() as whole_mode:
        run_step(model, kwargs, 11)
        whole = handle.receipt()
    with lowtide.attach(model, schedule=schedule) as handle, CountsAttention() as mode:
        result = run_step(model, kwargs, 11)
        receipt = handle.receipt()
    assert compare(plain, result) == []
    assert mode.total == plain_mode.total > 0
    assert whole_mode.total == 2 * plain_mode.total
    assert receipt.totals["recompute_calls"] == whole.totals["recompute_calls"]
    assert receipt.totals["kept_bytes"] > whole.totals["kept_bytes"]
    both = ("kept_bytes", "recomputed_bytes")
    assert sum(receipt.totals[k] for k in both) == sum(whole.totals[k] for k in both)
    without = {note.subject for note in receipt.fallbacks if "no attention kernel was called in it" in note.reason}
    resnets = {name for stack in stacks for name, block in stack.blocks if type(block).__name__ == "ResnetBlock2D"}
    assert without == resnets


# ---------------------------------------------------------------------- kernels and their arguments


def _bool_mask() -> torch.Tensor:
    mask = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[0, :, :, -3:] = False
    return mask


def _fused_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Three views with gaps of one storage, as a fused projection gives them."""
    both = torch.stack([v, q, k], dim=3)
    return F.scaled_dot_product_attention(both[:, :, :, 1], both[:, :, :, 2], value=both[:, :, :, 0])


def _twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attends twice, the second time with the first one's output."""
    first = F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(first, k, v, is_causal=True)


ATTENTION: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "plain": (sdpa_with(), {}),
    "causal": (sdpa_with(is_causal=True), {}),
    "boolean mask": (sdpa_with(attn_mask=_bool_mask()), {}),
    "broadcast mask": (sdpa_with(attn_mask=torch.linspace(-1, 1, TOKENS).expand(2, HEADS, TOKENS, TOKENS)), {}),
    "own scale": (sdpa_with(scale=0.2), {}),
    "grouped queries": (sdpa_with(enable_gqa=True), {"kv_heads": 2}),
    "fused projection": (_fused_qkv, {}),
    "twice": (_twice, {}),
}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("kind", ATTENTION)
def test_every_way_to_call_attention(kind: str, interval: int) -> None:
    attend, options = ATTENTION[kind]
    model = chain(attend, **options)
    assert_selective(model, lambda: model(inputs()), interval=interval)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_math_kernel_is_kept_while_its_matrices_are_small(dropout: float) -> None:
    model = chain(lambda q, k, v: packed_heads(q, k, v, dropout_p=dropout))
    with sdpa_kernel(SDPBackend.MATH):
        receipt = assert_selective(model, lambda: model(inputs(tokens=2)))
    assert not receipt.fallbacks


def test_a_kernel_that_saves_large_matrices_is_recomputed_and_the_receipt_says_so() -> None:
    model = chain()
    with sdpa_kernel(SDPBackend.MATH), attach(model) as handle:
        assert_equal_to_plain_math(model, handle)
        receipt = handle.receipt()
    assert [note.subject for note in receipt.fallbacks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert reasons(receipt) == {
        # copies of the arguments, the output and a matrix of 64 x 64 for each of 2 x 4 heads, in float32
        f"its attention kernel saves {4 * 16 + 128} KiB of intermediate matrices, so attention is recomputed"
    }
    with lowtide.attach(model) as handle, sdpa_kernel(SDPBackend.MATH):
        step(model, lambda: model(inputs(tokens=64)))
        whole = handle.receipt()
    assert [block.recomputed_bytes for block in receipt.blocks] == [block.recomputed_bytes for block in whole.blocks]
    assert [block.kept_bytes for block in receipt.blocks] == [block.kept_bytes for block in whole.blocks]


def assert_equal_to_plain_math(model: Chain, handle: lowtide.Handle) -> None:
    run = lambda: model(inputs(tokens=64))  # noqa: E731
    with CountsAttention() as mode:
        attached = step(model, run)
    assert mode.calls == {"math": 6}
    twin = chain()
    twin.load_state_dict(model.state_dict())
    assert_equal(attached, step(twin, lambda: twin(inputs(tokens=64))))


def test_what_is_kept_is_the_output_and_its_log_sum_exp() -> None:
    model = chain()
    receipt = assert_selective(model, lambda: model(inputs()))
    boundary = out = 2 * TOKENS * WIDTH * 4
    lse = 2 * TOKENS * HEADS * 4
    assert [block.kept_bytes for block in receipt.blocks] == [boundary + out + lse] * 3


def test_under_autocast_the_cast_arguments_are_recomputed_too() -> None:
    model = chain()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs()).float()

    receipt = assert_selective(model, run)
    out, lse = 2 * TOKENS * WIDTH * 2, 2 * TOKENS * HEADS * 4
    boundary = 2 * TOKENS * WIDTH * 4
    assert receipt.blocks[1].kept_bytes == boundary + out + lse


def test_autocast_casts_float32_arguments_of_the_kernel_as_it_would_itself() -> None:
    model = chain(lambda q, k, v: F.scaled_dot_product_attention(q.float() * 2, k.float(), value=v.float()))

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs()).float()

    receipt = assert_selective(model, run)
    out, lse = 2 * TOKENS * WIDTH * 2, 2 * TOKENS * HEADS * 4
    assert receipt.blocks[1].kept_bytes == 2 * TOKENS * WIDTH * 4 + out + lse


def test_a_float32_weight_among_the_arguments_is_left_to_autocasts_cache() -> None:
    class Learned(Attention):
        def __init__(self) -> None:
            super().__init__(self._attend)
            self.query = nn.Parameter(torch.randn(2, HEADS, TOKENS, WIDTH // HEADS))

        def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            first = F.scaled_dot_product_attention(self.query, k, v)
            return F.scaled_dot_product_attention(q + first, k, v) + F.scaled_dot_product_attention(self.query, v, k)

    torch.manual_seed(0)
    model = Chain([Learned() for _ in range(2)])

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs()).float()

    assert_selective(model, run)
