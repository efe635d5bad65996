"""Boolean masks: what torch makes of them is made again, from the mask that the forward had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

from lowtide.errors import ReplayError
from lowtide.runtime.entry_points import TORCHS
from lowtide.runtime.kernel_arguments import adds_mask
from tests.runtime.attention import (
    HEADS,
    SDPA,
    TOKENS,
    WIDTH,
    CountsAttention,
    assert_selective,
    attach,
    chain,
    inputs,
    reasons,
    sdpa_with,
)
from tests.runtime.toys import Chain, assert_equal, step

OUT, LSE = 2 * TOKENS * WIDTH, 2 * TOKENS * HEADS * 4


def mask_of_pairs(seed: int = 0) -> torch.Tensor:
    """Each head has one of its own."""
    mask = torch.rand(2, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(seed)).gt(0.2)
    mask[:, :, :, 0] = True
    return mask


def derived(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With a mask that is made inside the block."""
    mask = torch.arange(TOKENS).remainder(5).ne(3)
    return F.scaled_dot_product_attention(q, k, v, mask[:, None] | mask[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_the_additive_mask_is_made_again(dtype: torch.dtype, where: str) -> None:
    mask = mask_of_pairs()
    model = chain(derived if where == "inside" else sdpa_with(attn_mask=mask))

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(inputs()).float()

    receipt = assert_selective(model, run)
    kept = 2 * TOKENS * WIDTH * 4 + OUT * dtype.itemsize + LSE
    kept += mask.numel() * dtype.itemsize if where == "outside" else 0  # it may be exchanged before the replay
    assert receipt.blocks[1].kept_bytes == kept
    assert receipt.blocks[1].recomputed_bytes > TOKENS * TOKENS * dtype.itemsize
    assert not receipt.fallbacks


class Holder:
    """A block's attribute, say."""

    mask: Any = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask)


@pytest.mark.parametrize("after", ["another mask", "none", "another for a second forward"])
def test_a_mask_that_is_exchanged_before_backward_is_the_one_of_the_forward(after: str) -> None:
    holder = Holder()
    model = chain(holder.attend)

    def run() -> torch.Tensor:
        holder.mask = mask_of_pairs()
        output = model(inputs())
        holder.mask = None if after == "none" else mask_of_pairs(1)
        return output + model(inputs()) if "second" in after else output

    plain = step(model, run)
    with attach(model) as handle:
        assert_equal(plain, step(model, run))
    assert not handle.receipt().fallbacks


def test_a_mask_that_is_changed_in_place_before_backward_is_the_one_of_the_forward() -> None:
    """torch saves what it makes of it, so a plain run allows that."""
    holder = Holder()
    model = chain(holder.attend)

    def run() -> torch.Tensor:
        holder.mask = mask_of_pairs()
        output = model(inputs())
        holder.mask.copy_(mask_of_pairs(1))
        return output

    plain = step(model, run)
    with attach(model) as handle:
        assert_equal(plain, step(model, run))
    kept = 2 * TOKENS * WIDTH * 4 + OUT * 4 + LSE + mask_of_pairs().numel() * 4
    assert handle.receipt().blocks[1].kept_bytes == kept


def test_two_kernels_of_a_block_may_have_one_mask() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(TOKENS * TOKENS).remainder(5).ne(3).view(TOKENS, TOKENS)
        first = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(first, k, v, mask)

    model = chain(attend)
    receipt = assert_selective(model, lambda: model(inputs()))
    assert receipt.blocks[1].kept_bytes == 2 * TOKENS * WIDTH * 4 + 2 * (OUT * 4 + LSE)

    def changed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(TOKENS * TOKENS).remainder(5).ne(3).view(TOKENS, TOKENS)
        first = F.scaled_dot_product_attention(q, k, v, mask)
        mask[1:5, 2:] = False
        return F.scaled_dot_product_attention(first, k, v, mask)

    other = chain(changed)
    assert_selective(other, lambda: other(inputs()))


def test_a_mask_that_is_there_in_forward_alone_is_an_error() -> None:
    calls = 0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool) if calls <= 3 else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = chain(attend)
    with attach(model):
        loss = model(inputs()).square().sum()
        with pytest.raises(ReplayError, match="a boolean mask in forward and none on recomputation"):
            loss.backward()


def test_who_stands_in_the_place_of_torchs_attention_gets_the_boolean_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def other(q: Any, k: Any, v: Any, attn_mask: Any = None, window: int = 0) -> torch.Tensor:
        seen.add(attn_mask.dtype)
        return SDPA(q, k, v, attn_mask) * window

    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    mask = mask_of_pairs()
    model = chain(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, window=3))  # type: ignore[call-arg]
    plain = step(model, lambda: model(inputs()))
    with attach(model):
        assert_equal(plain, step(model, lambda: model(inputs())))
    assert seen == {torch.bool}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("more", [0, 4])
def test_masks_that_torch_has_a_class_for(bias: Callable[..., Any], more: int, by_name: bool) -> None:
    mask = bias(TOKENS, TOKENS + more)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (torch.cat([part, part[:, :, :more]], 2) for part in (k, v))
        return SDPA(q, k, v, mask) if by_name else F.scaled_dot_product_attention(q, k, v, mask)

    model = chain(attend)
    with CountsAttention() as plain_mode:
        plain = step(model, lambda: model(inputs()))
    with attach(model), CountsAttention() as mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
    assert mode.total == plain_mode.total


def test_attention_under_a_transform_inside_a_block_is_recomputed() -> None:
    mask = mask_of_pairs()
    attend = torch.vmap(lambda *given: F.scaled_dot_product_attention(*given))
    model = chain(lambda q, k, v: attend(q, k, v, mask))
    plain = step(model, lambda: model(inputs()))
    with attach(model) as handle:
        assert_equal(plain, step(model, lambda: model(inputs())))
    assert reasons(handle.receipt()) == {
        "its attention kernel runs inside a transform of torch.func, so attention is recomputed"
    }


class Seeing(TorchFunctionMode):
    """Notes the masks that go by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = (kwargs or {}).get("attn_mask")
        if mask is not None:
            self.seen.add(mask.dtype)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_boolean_mask() -> None:
    model = chain(sdpa_with(attn_mask=mask_of_pairs()))
    plain = step(model, lambda: model(inputs()))
    with attach(model), Seeing() as mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
    assert mode.seen == {torch.bool}


def test_which_masks_are_added() -> None:
    q = torch.randn(1, HEADS, 8, 16, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool)
    assert adds_mask(TORCHS, (q, q, q, mask), {}) and adds_mask(TORCHS, (q, q, q), {"attn_mask": mask})
    assert not adds_mask(TORCHS, (q, q, q, mask.float()), {}) and not adds_mask(TORCHS, (q, q, q), {"is_causal": True})
    assert not adds_mask(lambda *_: None, (q, q, q, mask), {})
    with sdpa_kernel(SDPBackend.MATH):
        assert not adds_mask(TORCHS, (q, q, q, mask), {})


@pytest.mark.parametrize("wrong", [{"attn_mask": mask_of_pairs(), "more": 1}, {"attn_mask": torch.ones(3, 3).bool()}])
def test_a_wrong_call_fails_with_the_kernels_words(wrong: dict[str, Any]) -> None:
    model: Chain = chain(sdpa_with(**wrong))
    with pytest.raises((TypeError, RuntimeError)) as plain:
        model(inputs())
    with attach(model), pytest.raises((TypeError, RuntimeError)) as ours:
        model(inputs())
    assert str(ours.value) == str(plain.value)
