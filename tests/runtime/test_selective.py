"""Selective blocks keep what their attention kernel gave out: attention runs once a step, gradients stay bit-equal."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide import families
from lowtide.attention_backend import entry_points
from lowtide.errors import ReplayError
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, run_step
from lowtide.plan.schedule import SELECTIVE, Schedule, StackSchedule, mixed, whole_blocks
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.resolve import resolve
from lowtide.testing import cpu_offload
from tests.runtime.memory import live_tensors
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


def _with(**kwargs: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs)


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
    "plain": (_with(), {}),
    "causal": (_with(is_causal=True), {}),
    "boolean mask": (_with(attn_mask=_bool_mask()), {}),
    "broadcast mask": (_with(attn_mask=torch.linspace(-1, 1, TOKENS).expand(2, HEADS, TOKENS, TOKENS)), {}),
    "own scale": (_with(scale=0.2), {}),
    "grouped queries": (_with(enable_gqa=True), {"kv_heads": 2}),
    "fused projection": (_fused_qkv, {}),
    "twice": (_twice, {}),
}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("kind", ATTENTION)
def test_every_way_to_call_attention(kind: str, interval: int) -> None:
    attend, options = ATTENTION[kind]
    model = chain(attend, **options)
    assert_selective(model, lambda: model(inputs()), interval=interval)


def _packed_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Contiguous arguments, of which the math kernel makes the fewest copies."""
    return F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), **kwargs)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_math_kernel_is_kept_while_its_matrices_are_small(dropout: float) -> None:
    model = chain(lambda q, k, v: _packed_heads(q, k, v, dropout_p=dropout))
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


# ---------------------------------------------------------------------- graphs


def test_backward_twice_over_a_retained_graph() -> None:
    model = chain(_with(is_causal=True))

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
    model = chain(_packed_heads)

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
                block(model).attend = _with()
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


# ---------------------------------------------------------------------- what the block does around its attention


def test_an_attention_output_changed_in_place_is_recomputed_where_the_kernel_allows_the_change() -> None:
    model = chain(lambda q, k, v: _packed_heads(q, k, v).mul_(2))
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


# ---------------------------------------------------------------------- the process


def test_another_thread_meanwhile_is_not_watched() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[torch.Tensor] = []
    q = torch.randn(1, 1, 4, 8, requires_grad=True)

    def other() -> None:
        assert inside.wait(10)
        for _ in range(2):
            seen.append(F.scaled_dot_product_attention(q, q, q))
        done.set()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert F.scaled_dot_product_attention is not SDPA
        inside.set()
        assert done.wait(10)
        return F.scaled_dot_product_attention(q, k, v)

    model = chain(attend)
    thread = threading.Thread(target=other)
    thread.start()
    with attach(model), CountsAttention() as mode:
        step(model, lambda: model(inputs()))
    thread.join()
    assert mode.total == 3
    assert torch.equal(seen[0], SDPA(q, q, q))
    assert seen[0].grad_fn is not None
    assert F.scaled_dot_product_attention is SDPA


def test_two_threads_train_at_once() -> None:
    models = [chain(_with(is_causal=bool(number))) for number in range(2)]
    plain = [_gradients(model) for model in models]
    results: list[list[torch.Tensor]] = [[], []]
    handles = [attach(model) for model in models]

    def train(number: int) -> None:
        for _ in range(20):
            results[number] = _gradients(models[number])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.detach()
    for expected, found in zip(plain, results, strict=True):
        assert all(map(torch.equal, expected, found))
    assert F.scaled_dot_product_attention is SDPA


def _gradients(model: Chain) -> list[torch.Tensor]:
    model.eval()  # no dropout: the generator is shared
    return list(torch.autograd.grad(model(inputs()).square().sum(), list(model.parameters())))


def test_somebody_elses_attention_in_the_place_is_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def mine(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return SDPA(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    model = chain()
    plain = step(model, lambda: model(inputs()))
    with attach(model):
        assert_equal(plain, step(model, lambda: model(inputs())))
        assert F.scaled_dot_product_attention is mine
    assert len(calls) == 6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_is_recomputed_whole_and_compiled_once() -> None:
    model = chain()
    model.eval()
    plain = step(model, lambda: model(inputs()))
    graphs: list[object] = []

    def backend(graph: Any, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    block(model).compile(backend=backend, fullgraph=True)
    with attach(model) as handle:
        for _ in range(3):
            assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert {note.subject: note.reason for note in receipt.fallbacks} == {
        "blocks.1": "no attention kernel was called in it, so it is recomputed whole"
    }


# ---------------------------------------------------------------------- diffusers' table of kernels


class Kernel(torch.autograd.Function):
    """Attention of a library: saves its arguments, its output and the sums it normalises with."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Kernel.runs += 1
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k)
        lse = logits.logsumexp(-1)
        out = torch.einsum("bhnm,bmhd->bnhd", (logits - lse[..., None]).exp(), v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) - lse[..., None]).exp()
        inner = torch.einsum("bnhd,bmhd->bhnm", grads[0], v) - torch.einsum("bnhd,bnhd->bhn", grads[0], out)[..., None]
        scores = weights * inner
        return (
            torch.einsum("bhnm,bmhd->bnhd", scores, k),
            torch.einsum("bhnm,bnhd->bmhd", scores, q),
            torch.einsum("bhnm,bnhd->bmhd", weights, grads[0]),
        )


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_kernel_of_diffusers_table_is_kept(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    from diffusers.models import attention_dispatch as dispatch

    registry, name = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.SAGE

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out, lse = Kernel.apply(query, key, value)
        F.scaled_dot_product_attention(query, key, value)  # inside another one: it counts as part of it
        return (out, lse) if with_lse else out

    monkeypatch.setitem(registry._backends, name, kernel)
    monkeypatch.setitem(registry._constraints, name, [])
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
    table = dict(registry._backends)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = dispatch.dispatch_attention_fn(q, k, v, backend=name)
        return (out[0] + 0 * out[1].mean() if with_lse else out).transpose(1, 2)

    model = chain(attend)
    plain = step(model, lambda: model(inputs()))
    Kernel.runs = 0
    with attach(model) as handle, CountsAttention() as mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
        assert not handle.receipt().fallbacks
    assert Kernel.runs == mode.total == 3
    assert registry._backends == table


def test_tables_and_functions_are_watched_through_one_entry_point_each() -> None:
    import diffusers.models.attention_dispatch  # noqa: F401

    first, second = entry_points(), entry_points()
    assert [entry.name for entry in first] == ["scaled_dot_product_attention", "_backends"]
    assert all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("region", [nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)])
def test_a_region_with_lowtide_checkpoint_runs_attention_again(region: Callable[[], Any]) -> None:
    model = chain(depth=1)
    with region(), CountsAttention() as mode:
        lowtide.checkpoint(model.blocks[0], inputs()).sum().backward()
    assert mode.total == 2
