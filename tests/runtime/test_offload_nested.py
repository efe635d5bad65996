"""Offload among other people's saved-tensor hooks and checkpoints, and among tensors that a ticket cannot describe."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.errors import ConfigError
from lowtide.plan.schedule import Schedule, mixed, whole_blocks
from lowtide.runtime.pool import Pool

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Gated(nn.Module):
    """A region of its own inside a block, whose argument is used outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(lowtide.checkpoint(self.inner, x, backend="unsloth", offload_min_bytes=0) * x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = SelfAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x)


class Stacked(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    run().square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def assert_as_plain(block: Callable[[], nn.Module], run: Callable[[nn.Module], torch.Tensor], **options: Any) -> None:
    torch.manual_seed(0)
    model = Stacked(block)
    plain = gradients(model, lambda: run(model))
    with lowtide.attach(model, offload_min_bytes=0, **options):
        for _ in range(3):  # the first step counts bytes and compares values, the next do not
            assert all(map(torch.equal, plain, gradients(model, lambda: run(model))))


SETTINGS = [
    {"backend": "torch", "interval": 3},
    {"backend": "unsloth"},
    {"backend": "unsloth", "interval": 2},
    {"schedule": Schedule({"blocks": mixed(["kept+saved", "whole+boundary"] * 2)})},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_region_that_offloads_inside_a_block(options: dict[str, Any]) -> None:
    x = torch.randn(2, 4, 8)
    assert_as_plain(Gated, lambda model: model(x), **options)


def test_a_region_that_offloads_inside_another() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def inner(y: torch.Tensor) -> torch.Tensor:
        return lowtide.checkpoint(layer, y, backend="unsloth", offload_min_bytes=0) * y

    plain = torch.autograd.grad((layer(x * 1) * (x * 1)).sum(), x)
    region = lowtide.checkpoint(inner, x * 1, backend="unsloth", offload_min_bytes=0, determinism_check="none")
    assert torch.equal(torch.autograd.grad(region.sum(), x)[0], plain[0])


SELECTIVE = [
    {"backend": "unsloth-selective"},
    {"backend": "torch-selective", "offload_attention": True},
    {"backend": "unsloth"},
]


@pytest.mark.parametrize("options", SELECTIVE, ids=str)
def test_an_attached_model_inside_torchs_checkpoint(options: dict[str, Any]) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    assert_as_plain(Attention, lambda model: torch_checkpoint(model, x, use_reentrant=False), **options)


@pytest.mark.parametrize("outer", ["torch", "unsloth"])
@pytest.mark.parametrize("options", SELECTIVE, ids=str)
def test_an_attached_model_inside_a_region(outer: str, options: dict[str, Any]) -> None:
    x = torch.randn(2, 4, 8)
    assert_as_plain(
        Attention, lambda model: lowtide.checkpoint(model, x, backend=outer, offload_min_bytes=0), **options
    )


# ---------------------------------------------------------------------- what a ticket cannot say


def test_conjugate_and_negative_views_of_what_has_left_already() -> None:
    offload = lowtide.offload_activations(offload_min_bytes=0)
    z, a = torch.tensor([1 + 2j]), torch.tensor([1 + 1j], requires_grad=True)
    w = torch.tensor([1.0], requires_grad=True)

    def conjugate() -> torch.Tensor:
        y = z * 1
        return (y * a + y.conj() * a).abs().sum()

    def negative() -> torch.Tensor:
        y = z * 1
        return (y.imag * w).sum() + (y.conj().imag * w * w).sum()

    for function, leaf in ((conjugate, a), (negative, w)):
        plain = torch.autograd.grad(function(), leaf)
        with offload:
            loss = function()
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], plain[0])


def test_buffers_are_in_cpu_memory_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert Pool(0, None).take(100).tensor.device.type == "cpu"


def test_the_error_names_the_block_that_saved() -> None:
    class Spoiling(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            z = super().forward(y)
            y.add_(1)
            return z

    torch.manual_seed(0)
    model, x = Stacked(Attention), torch.randn(2, 4, 8)
    model.blocks[3] = Spoiling()
    model.blocks[3].requires_grad_()
    schedule = Schedule({"blocks": mixed(["kept+saved"] * 4)})
    with lowtide.attach(model, schedule=schedule, offload_min_bytes=0), pytest.raises(RuntimeError, match=r"blocks\.3"):
        model(x).sum().backward()


# ---------------------------------------------------------------------- wrong values


@pytest.mark.parametrize("value", [-1, 1.5, True, "abc", None, [1]])
def test_a_wrong_size_is_one_error_that_names_the_argument(value: Any) -> None:
    with pytest.raises(ConfigError, match="offload_min_bytes"):
        lowtide.offload_activations(offload_min_bytes=value)
    with pytest.raises(ConfigError, match="offload_min_bytes"):
        lowtide.checkpoint(nn.Linear(2, 2), torch.ones(1, 2), backend="unsloth", offload_min_bytes=value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "abc", None])
def test_a_wrong_number_of_buckets_is_one_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="offload_pin_memory_max_buckets"):
        lowtide.offload_activations(offload_pin_memory_max_buckets=value)


def test_offload_activations_takes_a_model() -> None:
    with pytest.raises(ConfigError, match="the model itself"):
        lowtide.offload_activations(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]


WRONG: dict[str, Callable[[], Any]] = {
    "did you mean 'boundary'": lambda: mixed(["whole+boundry"]),
    "did you mean 'selective'": lambda: mixed(["selectiv"]),
    "cannot wait": lambda: mixed(["kept+"]),
    "does not begin": lambda: mixed([None]),  # type: ignore[list-item]
    "is not one of the 4 blocks": lambda: whole_blocks(4).moving("boundary", [5]),
    "nothing that can wait": lambda: whole_blocks(4).moving(["boundry"]),
    "prefetch_bytes": lambda: Schedule({"blocks": whole_blocks(4)}, prefetch_bytes="256MiB"),  # type: ignore[arg-type]
    "in_flight_bytes": lambda: Schedule({"blocks": whole_blocks(4)}, in_flight_bytes=-5),
    "must be a StackSchedule": lambda: Schedule({"blocks": ["kept"]}),  # type: ignore[dict-item]
    "must be a lowtide.plan.schedule.Schedule": lambda: lowtide.attach(Stacked(Attention), schedule=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_schedule_is_one_error_that_says_what_is_allowed(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WRONG[message]()


def test_moving_one_word_is_not_taken_for_its_letters() -> None:
    assert whole_blocks(2).moving("boundary") == whole_blocks(2).moving(["boundary"])


class Sides(nn.Module):
    """Attention and feed-forward side, with saved tensors before, between and after them; all of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Doubled(torch.tanh), Doubled(F.gelu)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.sigmoid(x)
        x = x + self.attn(x)
        x = torch.sin(x) * x
        return x + self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x)


class Doubled(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(32, 32), nn.Linear(32, 32), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class CheckpointInside(Sides):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(self.both, x, use_reentrant=False)


class LowtideInside(Sides):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lowtide.checkpoint(self.both, x)


@pytest.mark.parametrize("last", [CheckpointInside, LowtideInside])
@pytest.mark.parametrize("end", ["kept", "ffn"])
@pytest.mark.parametrize("word", ["kept+attention", "kept+saved", "whole+boundary", "ffn+boundary+attention"])
def test_a_checkpoint_inside_the_block_that_runs_last(last: type[Sides], end: str, word: str) -> None:
    """It is not to find other tensors when it recomputes than it saw, whether bytes are counted in the step or not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(32, 32), "blocks": nn.ModuleList([Sides(), Sides(), Sides(), last()])})
    x = torch.randn(32, 32)

    def gradients() -> list[torch.Tensor | None]:
        model.zero_grad()
        out = model["first"](x)
        for block in model["blocks"]:
            out = block(out)
        out.square().mean().backward()
        return [weight.grad for weight in model.parameters()]

    plain = gradients()
    schedule = Schedule({"blocks": mixed([word] * 3 + [end])})
    with lowtide.attach(model, schedule=schedule, offload_min_bytes=1) as handle:
        for _ in range(3):
            for found, expected in zip(gradients(), plain, strict=True):
                assert found is not None and expected is not None and torch.equal(found, expected)
            assert handle.receipt().copies.d2h_bytes > 0
