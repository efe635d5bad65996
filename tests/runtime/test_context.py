"""A recomputation sees what its forward saw (rule 11), whatever has changed since."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.runtime.toys import Block, Chain, assert_equal, assert_same_as_plain, chain, inputs, step


class Watches(Block):
    """Notes a piece of state at every forward, recomputations included."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read, self.seen = read, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.read())
        return super().forward(x)


def _deterministic(value: bool) -> AbstractContextManager[None]:
    @contextmanager
    def held() -> Iterator[None]:
        torch.use_deterministic_algorithms(value)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return held()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _matmul_precision(value: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


CONTEXTS = {
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast off inside on": (
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "default dtype": (lambda: _default_dtype(torch.float64), torch.get_default_dtype),
    "attention kernels": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
    ),
    "attention order": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: tuple(torch._C._get_sdp_priority_order()),
    ),
    "deterministic": (lambda: _deterministic(True), torch.are_deterministic_algorithms_enabled),
    "matmul precision": (lambda: _matmul_precision("high"), torch.get_float32_matmul_precision),
    "device context": (lambda: torch.device("cpu"), lambda: len(torch.overrides._get_current_function_mode_stack())),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("interval", [1, 2])
def test_recomputation_sees_the_forwards_context(name: str, interval: int) -> None:
    enter, read = CONTEXTS[name]
    torch.manual_seed(0)
    model = Chain([Watches(read) for _ in range(4)])
    outside, x = read(), inputs()
    with lowtide.attach(model, interval=interval) as handle:
        with enter():
            loss = model(x).float().sum()
        loss.backward()
        assert handle.receipt().totals["recompute_calls"] == 4
    assert read() == outside
    for block in model.blocks:
        assert len(block.seen) == 2
        assert block.seen[0] == block.seen[1]
        assert block.seen[0] != outside or name == "autocast off inside on"


class DecidesLate(Block):
    """Does what torch does on Hopper: the order of attention kernels is what it will be from its first use on."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order, self.seen = order, list[tuple[int, ...]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.seen:
            torch._C._set_sdp_priority_order(self.order)
        self.seen.append(tuple(torch._C._get_sdp_priority_order()))
        return super().forward(x)


@pytest.mark.parametrize("interval", [1, 2])
def test_what_torch_decides_at_its_first_use_is_restored_as_decided(interval: int) -> None:
    torch.manual_seed(0)
    before = torch._C._get_sdp_priority_order()
    first = DecidesLate(list(reversed(before)))
    model = Chain([Watches(lambda: tuple(torch._C._get_sdp_priority_order())), first, Block(), Block()])
    try:
        with lowtide.attach(model, interval=interval) as handle:
            model(inputs()).sum().backward()
            assert handle.receipt().totals["recompute_calls"] == 4
        assert first.seen == [tuple(reversed(before))] * 2
        assert torch._C._get_sdp_priority_order() == list(reversed(before))
    finally:
        torch._C._set_sdp_priority_order(before)


def test_backward_inside_another_context_does_not_leak_into_the_recomputation() -> None:
    torch.manual_seed(0)
    model = Chain([Watches(lambda: torch.is_autocast_enabled("cpu")) for _ in range(2)])
    with lowtide.attach(model, interval=2):
        loss = model(inputs()).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
    assert [block.seen for block in model.blocks] == [[False, False]] * 2


def test_autocast_gradients_equal_plain_ones() -> None:
    model, x = chain(), inputs()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    for interval in (1, 2):
        assert_same_as_plain(model, run, recomputed=4, interval=interval)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_glue_that_draws_random_numbers_between_blocks_with_dropout(interval: int) -> None:
    torch.manual_seed(0)
    model = Chain([Block(dropout=0.4) for _ in range(4)], lambda index, x: x * (1 + torch.rand(())))
    x = inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4, interval=interval)


def test_random_stream_after_the_step_is_that_of_a_plain_run() -> None:
    model, x = chain(dropout=0.5), inputs()
    step(model, lambda: model(x))
    expected = torch.rand(3)
    with lowtide.attach(model, interval=2):
        step(model, lambda: model(x))
        assert torch.equal(torch.rand(3), expected)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor, options: dict[str, torch.Generator]) -> torch.Tensor:
        return self.inner(x * torch.rand(x.shape, generator=options["generator"]))


class NoisyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, {"generator": generator})
        return x


@pytest.mark.parametrize("interval", [1, 2])
def test_generator_among_the_arguments_is_restored(interval: int) -> None:
    model, x, generator = NoisyModel(), inputs(), torch.Generator()

    def run() -> torch.Tensor:
        return model(x, generator.manual_seed(4))

    assert_same_as_plain(model, run, recomputed=4, interval=interval)
    following = torch.rand(2, generator=generator)
    with lowtide.attach(model, interval=interval):
        step(model, run)
        assert torch.equal(torch.rand(2, generator=generator), following)


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_of_the_forward_is_active_again() -> None:
    model, x = chain(2), inputs()
    with lowtide.attach(model):
        with Counts() as mode:
            loss = model(x).sum()
        forward = mode.calls
        loss.backward()
    assert mode.calls > forward


def test_diffusers_attention_backend_is_restored() -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    registry = dispatch._AttentionBackendRegistry
    torch.manual_seed(0)
    model = Chain([Watches(lambda: registry._active_backend) for _ in range(2)])
    before = registry._active_backend
    with lowtide.attach(model, interval=2):
        with dispatch.attention_backend("_native_math"):
            loss = model(inputs()).sum()
        loss.backward()
    assert registry._active_backend == before
    assert all(block.seen[0] == block.seen[1] != before for block in model.blocks)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[None, None].chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)[0, 0])


@pytest.mark.parametrize("kernel", [None, SDPBackend.MATH])
def test_attention_dropout(kernel: SDPBackend | None) -> None:
    torch.manual_seed(0)
    model, x = Chain([Attends() for _ in range(4)]), inputs()

    def run() -> torch.Tensor:
        with sdpa_kernel(kernel) if kernel is not None else nullcontext():
            return model(x)

    plain = step(model, run)
    with lowtide.attach(model, interval=2):
        assert_equal(plain, step(model, run))
