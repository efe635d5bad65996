"""Parts of torch that meet a recomputed block: checkpoints, saved-tensor hooks, functional transforms, replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ReplayError
from tests.integration.models import assert_recomputed, assert_same, blocks, build, check, inputs, step
from tests.runtime.toys import Block, Chain, assert_equal, chain
from tests.runtime.toys import inputs as toy_inputs
from tests.runtime.toys import step as toy_step

KEY = "flux1"
BLOCKS = 8


# ---------------------------------------------------------------------- torch's checkpoint and saved-tensor hooks


class Checkpointed(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = Block(dropout=0.2)
        self.scale = nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.scale(x), use_reentrant=self.reentrant)


def checkpointed_chain(reentrant: bool) -> Chain:
    torch.manual_seed(0)
    return Chain([Checkpointed(reentrant) for _ in range(4)])


@pytest.mark.parametrize("interval", [1, 2])
def test_torchs_checkpoint_inside_a_block(interval: int) -> None:
    model, x = checkpointed_chain(reentrant=False), toy_inputs()
    plain = toy_step(model, lambda: model(x))
    with lowtide.attach(model, interval=interval) as handle:
        assert_equal(plain, toy_step(model, lambda: model(x)))
        assert_recomputed(handle, width=interval)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_around_attached_blocks(interval: int, reentrant: bool) -> None:
    model, x = chain(4, dropout=0.2), toy_inputs().requires_grad_()
    plain = toy_step(model, lambda: model(x))

    def run() -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    with lowtide.attach(model, interval=interval) as handle:
        assert_equal(plain, toy_step(model, run))
        assert_recomputed(handle, width=interval)


def test_a_models_own_checkpointing_beside_an_attached_one() -> None:
    model = build(KEY)
    expected = step(model, KEY)
    model.enable_gradient_checkpointing()
    with lowtide.attach(model) as handle:
        for _ in range(2):
            assert_same(expected, step(model, KEY))
            receipt = assert_recomputed(handle)
            assert any("own gradient checkpointing" in warning for warning in receipt.warnings)


def test_lowtides_checkpoint_around_attached_blocks() -> None:
    model, x = chain(4, dropout=0.2), toy_inputs()
    plain = toy_step(model, lambda: model(x))
    with lowtide.attach(model, interval=2) as handle:
        assert_equal(plain, toy_step(model, lambda: lowtide.checkpoint(model, x)))
        assert_recomputed(handle, width=2)


class Seen:
    """Saved-tensor hooks that count what they are given, and give it back changed in identity only."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed += 1
        return tensor.detach().clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        self.unpacked += 1
        return packed

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_saved_tensor_hooks_outside_see_the_boundaries(interval: int) -> None:
    model, x, seen = chain(4), toy_inputs(), Seen()
    plain = toy_step(model, lambda: model(x))

    def run() -> torch.Tensor:
        with seen.hooks():
            return model(x)

    with lowtide.attach(model, interval=interval) as handle:
        assert_equal(plain, toy_step(model, run))
        assert_recomputed(handle, width=interval)
    assert seen.packed == seen.unpacked == 4 // interval


def test_boundaries_wait_on_the_cpu_where_save_on_cpu_is_on() -> None:
    model = build(KEY)
    expected = step(model, KEY)
    with lowtide.attach(model, interval=2) as handle, save_on_cpu():
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)


def test_saved_tensor_hooks_inside_a_block_go_before() -> None:
    seen = Seen()

    class Hooked(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with seen.hooks():
                scaled = x.sigmoid()
            return super().forward(scaled)

    torch.manual_seed(0)
    model, x = Chain([Hooked() for _ in range(4)]), toy_inputs().requires_grad_()
    plain = toy_step(model, lambda: model(x))
    assert seen.packed == seen.unpacked == 4
    with lowtide.attach(model, interval=2) as handle:
        assert_equal(plain, toy_step(model, lambda: model(x)))
        assert_recomputed(handle, width=2)
    assert seen.packed == 12, "forward twice, recomputation once"
    assert seen.unpacked == 8


def test_disabled_saved_tensor_hooks_pass_through() -> None:
    model, x = chain(), toy_inputs()
    plain = toy_step(model, lambda: model(x))
    with lowtide.attach(model) as handle:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert_equal(plain, toy_step(model, lambda: model(x)))
        assert handle.receipt().totals["recompute_calls"] == 0
        assert_equal(plain, toy_step(model, lambda: model(x)))
        assert_recomputed(handle)


# ---------------------------------------------------------------------- functional transforms


def test_functional_gradients_pass_through() -> None:
    model, x = chain(), toy_inputs()
    weights = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (row,)).square().sum()

    expected = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    with lowtide.attach(model, interval=2) as handle:
        found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
        assert handle.receipt().totals["recompute_calls"] == 0
        assert_equal(toy_step(model, lambda: model(x)), toy_step(model, lambda: model(x)))
        assert_recomputed(handle, width=2)
    assert_equal(expected, found)


def test_a_functional_call_with_other_weights_is_refused_in_backward() -> None:
    """The weights are in the module during the call only, so they are gone when it is recomputed."""
    model, x = chain(), toy_inputs()
    others = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    with lowtide.attach(model):
        output = functional_call(model, others, (x,))
        with pytest.raises(ReplayError, match="weight"):
            output.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_derivatives_and_backward_of_them() -> None:
    model, x = chain(), toy_inputs()
    tangent = toy_inputs().cos()

    def run() -> torch.Tensor:
        with forward_ad.dual_level():
            output = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
            assert output.tangent is not None
            return output.primal + output.tangent

    plain = toy_step(model, run)
    with lowtide.attach(model, interval=2) as handle:
        assert_equal(plain, toy_step(model, run))
        assert handle.receipt().totals["recompute_calls"] == 0  # passed through
        assert handle.receipt().warnings
        toy_step(model, lambda: model(x))
        assert_recomputed(handle, width=2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode() -> None:
    model = build(KEY)
    expected = step(model, KEY)
    with lowtide.attach(model, interval=2) as handle, torch.autograd.detect_anomaly():
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)


# ---------------------------------------------------------------------- copies, replicas, weights that change


def test_a_replica_passes_through() -> None:
    """What DataParallel makes of a module: an instance of its class with another identity, on another device."""
    model, x = chain(), toy_inputs()
    plain = toy_step(model, lambda: model(x))

    def replicated() -> torch.Tensor:
        hidden = x
        for block in model.blocks:
            replica = block._replicate_for_data_parallel()
            replica._parameters = block._parameters
            hidden = replica(hidden)
        return hidden

    with lowtide.attach(model) as handle:
        assert_equal(plain, toy_step(model, replicated))
        assert handle.receipt().totals["recompute_calls"] == 0
        assert handle.receipt().warnings
        assert_equal(plain, toy_step(model, lambda: model(x)))
        assert_recomputed(handle)


def test_an_average_of_the_weights_is_a_model_of_its_own() -> None:
    model = build(KEY)
    with lowtide.attach(model, interval=2) as handle:
        average: Any = AveragedModel(model)
        average.update_parameters(model)
        step(model, KEY)
        before = handle.receipt()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        average.update_parameters(model)
        reference = build(KEY)
        reference.load_state_dict(average.module.state_dict())
        average.requires_grad_()
        averaged = step(average.module, KEY)
        assert handle.receipt() == before, "a step of the average counts for the original"
        assert_same(step(reference, KEY), averaged)
        assert step(model, KEY).loss != averaged.loss
        assert_recomputed(handle, width=2)


def test_an_optimizer_that_steps_inside_backward() -> None:
    def trained(attached: bool) -> tuple[nn.Module, int]:
        model = build(KEY)
        handle = lowtide.attach(model, interval=2) if attached else None
        for weight in model.parameters():
            optimizer = torch.optim.AdamW([weight], lr=0.01)
            weight.register_post_accumulate_grad_hook(_stepping(optimizer))
        for seed in range(2):
            model(**inputs(KEY, seed)).sample.square().mean().backward()
        return model, handle.receipt().totals["recompute_calls"] if handle is not None else 0

    (plain, _), (model, recomputed) = trained(False), trained(True)
    assert recomputed == BLOCKS
    assert_equal(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert not torch.equal(model.proj_out.weight, build(KEY).proj_out.weight)


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step_now(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step_now


def test_parametrized_weights() -> None:
    def prepare(model: Any) -> nn.Module:
        for block in blocks(model):
            weight_norm(block.attn.to_q)
        return model

    check(lambda: build(KEY), prepare, KEY, interval=2)


# ---------------------------------------------------------------------- several handles


def test_an_attached_text_encoder_inside_an_attached_model() -> None:
    """A block that calls a model with a handle of its own: what runs inside a recorded block is part of it."""
    torch.manual_seed(0)
    encoder = chain(4, dropout=0.2)

    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + encoder(x))

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self.layers = nn.ModuleList(Reading(dropout=0.2) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x)
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Reader(), toy_inputs()
    plain = toy_step(model, lambda: model(x))
    inner = lowtide.attach(encoder, interval=2)
    with lowtide.attach(Chain(list(model.layers)), interval=2) as outer:
        assert_equal(plain, toy_step(model, lambda: model(x)))
        assert_recomputed(outer, width=2)
        assert all(block.recompute_calls > 0 for block in inner.receipt().blocks)
    inner.detach()
    assert_equal(plain, toy_step(model, lambda: model(x)))


def test_detach_in_the_middle_of_an_accumulation() -> None:
    model = build(KEY)

    def accumulated(handle: lowtide.Handle | None) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        for number in range(3):
            loss = model(**inputs(KEY, number)).sample.square().mean()
            if number == 1 and handle is not None:
                handle.detach()
            loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    expected = accumulated(None)
    handle = lowtide.attach(model, interval=2)
    found = accumulated(handle)
    assert_equal(expected, found)
    assert_recomputed(handle, width=2)
