"""Selective blocks keep what their attention kernel gave out, whatever else they do, or say why not."""

import weakref
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.errors import ReplayError
from lowtide.plan.schedule import Schedule, mixed
from tests.runtime.attention import (
    HEADS,
    SDPA,
    TOKENS,
    WIDTH,
    Attention,
    CountsAttention,
    assert_selective,
    attach,
    block,
    chain,
    inputs,
    packed_heads,
    reasons,
)
from tests.runtime.toys import Chain, assert_equal, step


def test_an_attention_output_changed_in_place_is_recomputed_where_the_kernel_allows_the_change() -> None:
    model = chain(lambda q, k, v: packed_heads(q, k, v).mul_(2))
    with sdpa_kernel(SDPBackend.MATH):
        receipt = assert_selective(model, lambda: model(inputs(tokens=6)), attention=6)
    assert reasons(receipt) == {"its attention output is modified in place, so attention is recomputed"}


def test_an_attention_output_changed_in_place_is_an_error_where_it_is_one_in_a_plain_run() -> None:
    model = chain(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).mul_(2))
    with pytest.raises(RuntimeError, match="inplace operation"):
        step(model, lambda: model(inputs()))
    with attach(model), pytest.raises(ReplayError, match=r"blocks\.2: .* modified by an inplace operation"):
        step(model, lambda: model(inputs()))


def test_arguments_changed_in_place_before_the_kernel() -> None:
    model = chain(lambda q, k, v: F.scaled_dot_product_attention(q.clone().mul_(2), k.add(1).neg_(), v))
    assert_selective(model, lambda: model(inputs()))


def test_attention_without_gradients_is_recomputed() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weights = F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, weights + v)

    model = chain(attend)
    receipt = assert_selective(model, lambda: model(inputs()), attention=9)
    assert not receipt.fallbacks


def test_attention_under_other_hooks_in_the_block_belongs_to_them() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            first = F.scaled_dot_product_attention(q, k, v)
        second = torch_checkpoint(F.scaled_dot_product_attention, first, k, v, use_reentrant=False)
        third = lowtide.checkpoint(lambda x: F.scaled_dot_product_attention(x, k, v), second)
        return F.scaled_dot_product_attention(third, k, v)

    model = chain(attend)
    plain = step(model, lambda: model(inputs()))
    with attach(model) as handle:
        assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    assert F.scaled_dot_product_attention is SDPA
    said = "saved-tensor hooks inside it take what its attention kernel saves, so attention is recomputed"
    assert reasons(receipt) == {said}


class Tagged(torch.Tensor):
    """A subclass, about whose storage nothing is known."""


def test_tensor_subclasses_are_recomputed() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.as_subclass(Tagged), k, v).as_subclass(torch.Tensor)

    model = chain(attend)
    receipt = assert_selective(model, lambda: model(inputs()), attention=6)
    assert reasons(receipt) == {"its attention kernel takes or gives a Tagged, so attention is recomputed"}


class Ends(Attention):
    """Its attention kernel saves the last tensor of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_block_that_ends_with_its_attention(interval: int, with_hook: bool) -> None:
    torch.manual_seed(0)
    model, seen = Chain([Ends() for _ in range(3)]), list[int]()
    for module in model.blocks if with_hook else ():  # rule 12: nothing is skipped then
        module.register_forward_hook(
            lambda module, args, output: seen.append(tuple(output.shape) == (2, TOKENS, WIDTH))
        )
    plain, mode = step(model, lambda: model(inputs())), CountsAttention()
    with attach(model, interval), mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
    assert mode.total == 3
    assert seen == [True] * 9 * with_hook


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's own block, whose attention is called inside torch.nn.functional."""


def test_multi_head_attention_of_torch() -> None:
    torch.manual_seed(0)
    model = Chain([EncoderLayer(WIDTH, HEADS, 64, 0.1, batch_first=True) for _ in range(3)])
    for layer in model.blocks:
        cast(EncoderLayer, layer).self_attn.dropout = 0.0  # with dropout the math kernel's matrices are too many
    assert_selective(model, lambda: model(inputs()))


@pytest.mark.parametrize("interval", [1, 2])
def test_a_block_that_differentiates_within_its_forward(interval: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = F.scaled_dot_product_attention(q, k, v)
        (grad,) = torch.autograd.grad(first.square().sum(), q, retain_graph=True)
        return F.scaled_dot_product_attention(q + grad.detach(), k, first)

    model = chain(attend)
    plain = step(model, lambda: model(inputs()))
    with attach(model, interval) as handle:
        assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    assert reasons(receipt) == {"it reads its saved tensors in its own forward, so attention is recomputed"}


def test_a_block_that_tries_another_kernel() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        try:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(5, 7))
        except RuntimeError:
            return F.scaled_dot_product_attention(q, k, v)

    model = chain(attend)
    assert_selective(model, lambda: model(inputs()))


@pytest.mark.parametrize("forward", [1, 2])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_another_number_of_attention_calls_in_the_replay_is_an_error(forward: int, with_gradients: bool) -> None:
    model = chain()
    block(model).register_forward_hook(lambda module, args, output: None)  # so that the replay runs to its end

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v)
        with torch.set_grad_enabled(with_gradients):
            for _ in range(block(model).calls % 2 if forward == 2 else block(model).calls - 1):
                out = out + F.scaled_dot_product_attention(q, k, v)
        return out

    block(model).attend = attend
    said = rf"blocks\.1 .*it called attention {forward} times in forward and {3 - forward} times on recomputation"
    if with_gradients and forward == 2:  # found by the number of saved tensors
        said = r"blocks\.1 "
    with attach(model), pytest.raises(ReplayError, match=said):
        step(model, lambda: model(inputs()))


def test_what_a_kernel_is_given_is_not_held_between_forward_and_backward() -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.clone(), k.clone(), v.clone()
        given.extend(weakref.ref(tensor) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    model = chain(attend)
    with attach(model):
        output = model(inputs())
        assert len(given) == 9
        assert [alive() for alive in given] == [None] * 9
        output.sum().backward()


def test_other_shapes_in_the_replay_are_an_error() -> None:
    model = chain()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        part = block(model).calls
        return F.scaled_dot_product_attention(q, k[:, :, :-part], v[:, :, :-part])

    block(model).attend = attend
    said = r"blocks\.1 .* of attention call 0 tensor 1 that it passes was \(2, 4, 11, 8\)"
    with attach(model), pytest.raises(ReplayError, match=said):
        step(model, lambda: model(inputs()))


def test_a_block_without_attention_is_recomputed_whole() -> None:
    model = chain(lambda q, k, v: v)
    receipt = assert_selective(model, lambda: model(inputs()), attention=0)
    assert reasons(receipt) == {"no attention kernel was called in it, so it is recomputed whole"}


def test_a_kernel_taken_by_reference_cannot_be_seen_and_is_recomputed() -> None:
    model = chain(SDPA)
    receipt = assert_selective(model, lambda: model(inputs()), attention=6)
    assert reasons(receipt) == {"no attention kernel was called in it, so it is recomputed whole"}


def test_selective_beside_other_treatments_in_one_stack() -> None:
    model = chain(depth=4)
    plain = step(model, lambda: model(inputs()))
    words = ["selective", "whole", "kept", "selective"]
    with lowtide.attach(model, schedule=Schedule({"blocks": mixed(words)})) as handle, CountsAttention() as mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    assert mode.total == 5
    assert [block.treatment for block in receipt.blocks] == words
