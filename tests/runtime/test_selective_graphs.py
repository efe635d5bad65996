"""Selective blocks keep what their attention kernel gave out: in every graph, under hooks, and in CPU memory."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.plan.schedule import Schedule
from lowtide.testing import cpu_offload
from tests.runtime.attention import (
    HEADS,
    SDPA,
    TOKENS,
    WIDTH,
    CountsAttention,
    assert_selective,
    attach,
    block,
    chain,
    inputs,
    packed_heads,
    sdpa_with,
    selective,
)
from tests.runtime.memory import live_tensors
from tests.runtime.toys import assert_equal, step

# ---------------------------------------------------------------------- graphs


def test_backward_twice_over_a_retained_graph() -> None:
    model = chain(sdpa_with(is_causal=True))

    def twice() -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = model(inputs()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    plain = twice()
    with attach(model, 2), CountsAttention() as mode:
        assert_equal(plain, twice())
    assert mode.calls == {"fused": 3}


def test_double_backward_works_where_the_kernel_allows_it() -> None:
    model = chain(packed_heads)

    def penalised() -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        x = inputs(tokens=6).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    with sdpa_kernel(SDPBackend.MATH):
        plain = penalised()
        with attach(model):
            assert_equal(plain, penalised())
    with pytest.raises(RuntimeError) as plain_error:
        penalised()
    with attach(model), pytest.raises(RuntimeError) as error:
        penalised()
    assert str(error.value) == str(plain_error.value)


def test_two_forwards_before_one_backward() -> None:
    model = chain()

    def both() -> torch.Tensor:
        first = model(inputs())
        return first + model(inputs() * 2)

    plain = step(model, both)
    with attach(model, 2), CountsAttention() as mode:
        assert_equal(plain, step(model, both))
    assert mode.total == 6


class Refuses(Exception):
    pass


@contextmanager
def nothing_is_left(size: int) -> Iterator[None]:
    """Without a collector run: no tensor of that many elements more than before."""
    before = live_tensors(size)
    yield
    assert live_tensors(size) == before


@pytest.mark.parametrize("interval", [1, 2])
def test_nothing_is_left_of_steps_dropped_graphs_and_exceptions(interval: int) -> None:
    size = 2 * TOKENS * WIDTH
    model = chain()
    x = inputs()

    def refuse(*_: object) -> NoReturn:
        raise Refuses

    with attach(model, interval):
        model(x).sum().backward()
        gc.collect()
        gc.disable()
        try:
            with nothing_is_left(size), nothing_is_left(2 * TOKENS * HEADS):
                for _ in range(100):
                    model(x).sum().backward()
            with nothing_is_left(size):
                output = model(x)
                assert live_tensors(size) > 3
                del output
            with nothing_is_left(size):
                with pytest.raises(Refuses):
                    block(model).attend = lambda q, k, v: refuse(F.scaled_dot_product_attention(q, k, v))
                    model(x)
                block(model).attend = sdpa_with()
            assert F.scaled_dot_product_attention is SDPA
            with nothing_is_left(size):
                loss = model(x).sum()
                loss.register_hook(refuse)
                with pytest.raises(Refuses):
                    loss.backward()
                del loss
        finally:
            gc.enable()


def test_an_out_of_memory_in_the_replay_can_be_tried_again() -> None:
    model, failed = chain(), []
    plain = step(model, lambda: model(inputs()))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v)
        if block(model).calls == 2 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no memory")
        return out

    block(model).attend, block(model).calls = attend, 0
    with attach(model), CountsAttention() as mode:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        output = model(inputs())
        with pytest.raises(torch.OutOfMemoryError):
            output.square().sum().backward(retain_graph=True)
        assert F.scaled_dot_product_attention is SDPA
        model.zero_grad(set_to_none=True)
        output.square().sum().backward()
    assert failed
    assert mode.total == 3
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    assert_equal({name: grad for name, grad in plain.items() if name != "output"}, found)


# ---------------------------------------------------------------------- hooks around the model, offload


def test_hooks_around_the_model_pack_what_is_kept() -> None:
    model = chain()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    def run() -> torch.Tensor:
        with saved_tensors_hooks(pack, packed.__getitem__):
            return model(inputs())

    assert_selective(model, run)
    packed.clear()
    with attach(model):
        run()
    shapes = Counter(tuple(tensor.shape) for tensor in packed)
    assert shapes[2, HEADS, TOKENS] == 3  # log-sum-exp
    assert shapes[2, HEADS, TOKENS, WIDTH // HEADS] == 6  # the output, as the kernel saved it and as it returned it


@pytest.mark.parametrize("interval", [1, 2])
def test_attention_outputs_wait_in_cpu_memory(interval: int) -> None:
    model = chain(depth=5)
    plain = step(model, lambda: model(inputs()))
    schedule = Schedule({"blocks": selective(5, interval).moving(["attention"])})
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=0) as handle:
        with CountsAttention() as mode:
            assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    assert mode.total == 5
    attention = 2 * TOKENS * WIDTH * 4 + 2 * TOKENS * HEADS * 4
    assert [block.cpu_bytes for block in receipt.blocks] == [attention] * 4 + [0]  # the last segment stays
