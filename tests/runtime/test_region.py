"""``lowtide.checkpoint``: a drop-in for torch's function."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import lowtide
from lowtide.errors import ConfigError, ReplayError
from tests.runtime.toys import Block, assert_equal, chain, inputs, step


def regions(model: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    for block in model.blocks:  # type: ignore[union-attr]
        x = lowtide.checkpoint(block, x, **options)
    return x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_reentrant": False},
        {"preserve_rng_state": True},
        {"determinism_check": "none"},
        {"debug": True},
        {"early_stop": False},
        {"context_fn": lambda: (nullcontext(), nullcontext())},
    ],
)
def test_gradients_and_counts(options: dict[str, Any]) -> None:
    model, x = chain(3, dropout=0.3), inputs()
    plain = step(model, lambda: model(x))
    for block in model.blocks:
        block.calls = 0
    assert_equal(plain, step(model, lambda: regions(model, x, **options)))
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_contexts_of_forward_and_recomputation() -> None:
    seen: list[str] = []

    @contextmanager
    def named(name: str) -> Any:
        seen.append(name)
        yield

    loss = lowtide.checkpoint(Block(), inputs(), context_fn=lambda: (named("forward"), named("again"))).sum()
    assert seen == ["forward"]
    loss.backward()
    assert seen == ["forward", "again"]


def test_torchs_selective_contexts_work() -> None:
    model, x = chain(3), inputs()
    plain = step(model, lambda: model(x))
    kept = [torch.ops.aten.addmm.default]
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(kept)}
    assert_equal(plain, step(model, lambda: regions(model, x, **options)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "torhc"}, "did you mean 'torch'"),
        ({"use_reentrant": True}, "use_reentrant=True is refused"),
        ({"determinism_check": "strict"}, "'default', 'none'"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowtide.checkpoint(Block(), inputs(), **options)


def test_diffusers_checkpoint_function(caplog: pytest.LogCaptureFixture) -> None:
    flux = pytest.importorskip("diffusers").FluxTransformer2DModel
    from lowtide import families
    from lowtide.measure.build import build_model
    from lowtide.measure.inputs import build_inputs

    family = families.by_class(flux.__name__)
    assert family is not None
    model, x = build_model(family, "tiny"), build_inputs(family.tiny, torch.float32)
    plain = step(model, lambda: model(**x, return_dict=False)[0])
    calls: list[nn.Module] = []

    def counted(block: Any, *args: Any) -> Any:
        calls.append(block)
        return lowtide.checkpoint(block, *args)

    model.enable_gradient_checkpointing(counted)  # type: ignore[operator]
    assert_equal(plain, step(model, lambda: model(**x, return_dict=False)[0]))
    assert len(calls) == 14
    assert not caplog.records
    with lowtide.attach(model, interval=2) as handle:  # both at once: wasteful, right, and said
        assert ["model's own gradient checkpointing is on" in record.getMessage() for record in caplog.records] == [
            True
        ]
        assert_equal(plain, step(model, lambda: model(**x, return_dict=False)[0]))
        assert any("model's own gradient checkpointing" in warning for warning in handle.receipt().warnings)
    model.enable_gradient_checkpointing(lowtide.checkpoint)  # type: ignore[operator]
    assert_equal(plain, step(model, lambda: model(**x, return_dict=False)[0]))


def test_closure_is_seen_as_it_was_at_the_call() -> None:
    """Late binding: by backward the loop variable names the last block. torch's function recomputes with that one."""
    model, x = chain(3), inputs()
    plain = step(model, lambda: model(x))

    def run(checkpoint: Any, **options: Any) -> torch.Tensor:
        hidden = x
        for block in model.blocks:
            hidden = checkpoint(lambda value: block(value), hidden, **options)  # noqa: B023
        return hidden

    assert_equal(plain, step(model, lambda: run(lowtide.checkpoint)))
    wrong = step(model, lambda: run(torch_checkpoint, use_reentrant=False))
    assert not torch.equal(wrong["blocks.0.up.weight"], plain["blocks.0.up.weight"])  # type: ignore[arg-type]


def test_closed_over_tensor_gets_its_gradient_and_is_watched() -> None:
    block, x, shift = Block(), inputs(), torch.randn(16, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x * shift.exp()).sum(), shift)
    scale = shift.exp()
    (found,) = torch.autograd.grad(lowtide.checkpoint(lambda value: block(value * scale), x).sum(), shift)
    assert torch.equal(expected, found)
    scale = shift.exp()
    loss = lowtide.checkpoint(lambda value: block(value * scale), x).sum()
    with torch.no_grad():
        scale.mul_(2)
    with pytest.raises(ReplayError, match="modified by an inplace"):
        loss.backward()


def test_closure_that_refers_to_its_own_output_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            box = {"big": torch.zeros(1000)}
            alive = weakref.ref(box["big"])

            def region(value: torch.Tensor, box: dict[str, torch.Tensor] = box) -> torch.Tensor:
                return value * box["big"][0]

            box["out"] = lowtide.checkpoint(region, torch.randn(4, requires_grad=True))
            if backward:
                box["out"].sum().backward()
            del box, region
            assert alive() is None
    finally:
        gc.enable()


def test_value_drift_is_caught() -> None:
    layer, calls = nn.Linear(8, 8), [0]

    class Drifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return torch.sin(layer(x) * (1.0 if calls[0] % 2 else 1.2))

    loss = lowtide.checkpoint(Drifts(), torch.randn(4, 8)).sum()
    with pytest.raises(ReplayError, match="differ"):
        loss.backward()


def test_debug_compares_every_saved_tensor() -> None:
    first, last, calls = nn.Linear(8, 8), nn.Linear(8, 8), [0]

    class DriftsInside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            hidden = torch.sin(first(x) * (1.0 if calls[0] % 2 else 1.2))
            return torch.sin(last(hidden * 0))

    lowtide.checkpoint(DriftsInside(), torch.randn(4, 8)).sum().backward()
    with pytest.raises(ReplayError, match="differ"):
        lowtide.checkpoint(DriftsInside(), torch.randn(4, 8), debug=True).sum().backward()


def test_nothing_is_recorded_without_gradients() -> None:
    block = Block()
    with torch.no_grad():
        lowtide.checkpoint(block, inputs())
    assert block.calls == 1
