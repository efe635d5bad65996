"""Real diffusers models, tiny and few blocks deep, and the comparison of an attached step with a plain one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide import families
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import StepResult, compare, run_step
from lowtide.runtime.receipt import Receipt

torch.set_num_threads(1)

_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
_DEPTHS = {"flux1": ("num_layers", "num_single_layers"), "wan21_1_3b": ("num_layers",)}


def row(key: str, depth: int = 4) -> Family:
    """A family's row with ``depth`` blocks in every stack of its tiny model."""
    known = families.find(key)
    return replace(known, tiny=replace(known.tiny, config={**known.tiny.config, **dict.fromkeys(_DEPTHS[key], depth)}))


def build(key: str, depth: int = 4) -> Any:
    return build_model(row(key, depth))


def inputs(key: str, seed: int = 0) -> dict[str, Any]:
    return build_inputs(row(key).tiny, seed=seed)


def blocks(model: nn.Module) -> list[nn.Module]:
    """By the names of their classes, as other libraries find them."""
    names = {name for known in families.all_families() for name in known.block_classes}
    return [module for module in model.modules() if type(module).__name__ in names]


def step(model: nn.Module, key: str, seed: int = 0) -> StepResult:
    """Outputs, loss and gradients of one step; names are those that parameters have without wrappers."""
    result = run_step(model, inputs(key), seed)
    return replace(result, gradients={unwrapped(name): found for name, found in result.gradients.items()})


def unwrapped(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


def assert_same(expected: StepResult, found: StepResult) -> None:
    """Bit for bit, and not nothing."""
    assert any(gradient is not None for gradient in expected.gradients.values())
    assert [str(difference) for difference in compare(expected, found)] == []


def assert_recomputed(handle: lowtide.Handle, times: int = 1, width: int | None = None) -> Receipt:
    """Every block was recomputed ``times`` times, in segments of ``width`` blocks at most and no fallback."""
    receipt = handle.receipt()
    assert [block.recompute_calls for block in receipt.blocks] == [times] * len(receipt.blocks), receipt.blocks
    assert all(block.recomputed_bytes > 0 for block in receipt.blocks)
    assert not receipt.fallbacks, receipt.fallbacks
    if width is not None:
        segments = [block.segment for block in receipt.blocks]
        assert max(segments.count(number) for number in segments) == width
    return receipt


def check(make: Callable[[], Any], prepare: Callable[[Any], Any], key: str, **options: Any) -> None:
    """``prepare`` (what another library does to a model) before and after attach: gradients as without attach."""
    expected = step(prepare(make()), key)
    for attach_first in (True, False):
        model = make()
        if attach_first:
            handle = lowtide.attach(model, **options)
            model = prepare(model)
        else:
            model = prepare(model)
            handle = lowtide.attach(model, **options)
        for _ in range(2):
            assert_same(expected, step(model, key))
            assert_recomputed(handle, width=options.get("interval"))
        handle.detach()
        assert_same(expected, step(model, key))
