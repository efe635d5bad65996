"""Hooks that users and libraries put on modules run as often as with torch's checkpoint, and see what they should."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from torch import nn

import lowtide
from lowtide.measure.parity import StepResult
from tests.integration.models import assert_recomputed, assert_same, blocks, build, check, step

KEY = "flux1"
BLOCKS = 8

# Flux calls its blocks with keywords, of which torch's backward hooks see nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def lora(model: Any) -> Any:
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    return model


# ---------------------------------------------------------------------- forward and backward hooks


@pytest.mark.parametrize("inside", [False, True], ids=["on blocks", "inside blocks"])
@pytest.mark.parametrize("interval", [1, 2])
def test_forward_hooks_that_change_values(inside: bool, interval: int) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        for block in blocks(model):
            module: Any = block.attn if inside else block
            module.register_forward_pre_hook(_scaled_arguments, with_kwargs=True)
            module.register_forward_hook(lambda module, args, output: _scaled(output, 0.75))
        return model

    assert step(prepare(build(KEY)), KEY).loss != step(build(KEY), KEY).loss
    check(lambda: build(KEY), prepare, KEY, interval=interval)


def _scaled_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.25}


def _scaled(output: Any, factor: float) -> Any:
    return output * factor if isinstance(output, torch.Tensor) else tuple(part * factor for part in output)


def test_hooks_run_once_more_for_each_recomputation() -> None:
    calls: Counter[str] = Counter()
    model = build(KEY)
    expected = step(model, KEY)
    for block in blocks(model):
        block.register_forward_pre_hook(lambda *_: calls.update(["before"]))
        block.register_forward_hook(lambda *_: calls.update(["after"]))
        block.register_full_backward_hook(lambda *_: calls.update(["backward"]))
    with lowtide.attach(model, interval=2, segment_stride=4) as handle:
        assert_same(expected, step(model, KEY))
        recomputed = handle.receipt().totals["recompute_calls"]
    assert recomputed == BLOCKS // 2
    assert calls == {"before": BLOCKS + recomputed, "after": BLOCKS + recomputed, "backward": BLOCKS}


def test_backward_hooks_that_change_gradients() -> None:
    def prepare(model: nn.Module) -> nn.Module:
        for block in blocks(model):
            block.register_full_backward_pre_hook(_halved)
        return model

    assert not torch.equal(_some_gradient(step(prepare(build(KEY)), KEY)), _some_gradient(step(build(KEY), KEY)))
    check(lambda: build(KEY), prepare, KEY, interval=2)


def _halved(module: nn.Module, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


def _some_gradient(result: StepResult) -> torch.Tensor:
    gradient = result.gradients["x_embedder.weight"]
    assert gradient is not None
    return gradient


def test_a_forward_patched_on_the_instance() -> None:
    def prepare(model: nn.Module) -> nn.Module:
        for block in blocks(model):
            original: Callable[..., Any] = block.forward
            block.forward = lambda *args, original=original, **kwargs: _scaled(original(*args, **kwargs), 0.5)
        return model

    assert step(prepare(build(KEY)), KEY).loss != step(build(KEY), KEY).loss
    check(lambda: build(KEY), prepare, KEY, interval=2)


# ---------------------------------------------------------------------- libraries that move weights


class Fetch(ModelHook):
    """Brings the weights of a module in before its forward and takes them away afterwards, as offloading does."""

    def __init__(self) -> None:
        self.home: dict[str, torch.Tensor] = {}
        self.present = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.home = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        return self._take_away(module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, weight in module.named_parameters():
            weight.data = self.home[name].clone()
        self.present += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._take_away(module)
        return output

    def _take_away(self, module: nn.Module) -> nn.Module:
        for weight in module.parameters():
            weight.data = torch.full_like(weight, torch.nan)
        return module


@pytest.mark.parametrize("options", [{"interval": 1}, {"interval": 2}, {"backend": "torch-ffn"}], ids=str)
def test_frozen_weights_that_a_hook_brings_and_takes_away(options: dict[str, Any]) -> None:
    """Stock training cannot do this: backward reads weights that are gone. Recomputation brings them again."""
    model = lora(build(KEY))
    expected = step(model, KEY)
    hooks = []
    for block in blocks(model):
        for name in ("ff", "ff_context", "proj_out"):
            if hasattr(block, name):
                hooks.append(Fetch())
                add_hook_to_module(getattr(block, name), hooks[-1])
    with lowtide.attach(model, **options) as handle:
        found = step(model, KEY)
        assert_recomputed(handle, width=options.get("interval"))
    assert_same(expected, found)
    assert {hook.present for hook in hooks} == {2}, "once in forward, once in recomputation"


def test_weights_that_accelerate_keeps_on_the_meta_device_between_calls() -> None:
    model = lora(build(KEY))
    expected = step(model, KEY)
    model = lora(build(KEY))
    for block in blocks(model):
        if hasattr(block, "ff"):
            cpu_offload(block.ff, execution_device=torch.device("cpu"))
    assert model.transformer_blocks[0].ff.net[2].weight.is_meta
    with lowtide.attach(model, interval=2) as handle:
        for _ in range(2):
            found = step(model, KEY)
            trained = {name for name, gradient in expected.gradients.items() if gradient is not None}
            assert all(torch.equal(expected.gradients[name], found.gradients[name]) for name in trained)
            assert_recomputed(handle, width=2)
        assert model.transformer_blocks[0].ff.net[2].weight.is_meta, "recomputation left the weights loaded"
    assert trained


def test_an_accelerate_hook_added_and_removed_while_attached() -> None:
    model = build(KEY)
    expected = step(model, KEY)
    with lowtide.attach(model, interval=2) as handle:
        for block in blocks(model):
            add_hook_to_module(block, ModelHook())
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)
        for block in blocks(model):
            remove_hook_from_module(block)
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)


@pytest.mark.parametrize(
    "kind", [{"offload_type": "block_level", "num_blocks_per_group": 2}, {"offload_type": "leaf_level"}], ids=str
)
def test_diffusers_group_offload(kind: dict[str, Any]) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), **kind)
        return model

    check(lambda: build(KEY), prepare, KEY, interval=2)


def test_diffusers_layerwise_casting() -> None:
    def prepare(model: Any) -> nn.Module:
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        return model

    check(lambda: lora(build(KEY)), prepare, KEY, interval=2)
