"""With torch's wrappers around blocks (FSDP's activation checkpointing), lowtide's own is off, and says so once."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import lowtide
from lowtide.plan.schedule import Schedule, mixed
from tests.runtime.toys import Block, Chain, step

BLOCKS = 4


def wrapped(check: Callable[[nn.Module], bool]) -> Chain:
    torch.manual_seed(0)
    model = Chain([Block(8) for _ in range(BLOCKS)])
    apply_activation_checkpointing(model, check_fn=check)
    return model


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def calls_of(model: nn.Module, x: torch.Tensor) -> int:
    """Of one linear layer in a step."""
    layer, calls = next(module for module in model.modules() if isinstance(module, nn.Linear)), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = layer.register_forward_hook(count)
    model(x).sum().backward()
    hook.remove()
    return calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interval": 2},
        {"backend": "auto"},
        {"backend": None},
        {"schedule": Schedule({"blocks": mixed(["whole"] * BLOCKS)})},
    ],
    ids=str,
)
@pytest.mark.parametrize("check", [is_block, is_linear])
def test_ours_is_off(
    check: Callable[[nn.Module], bool], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = wrapped(check), torch.randn(3, 8)
    plain, calls = step(model, lambda: model(x)), calls_of(model, x)
    with caplog.at_level(logging.INFO, logger="lowtide"), lowtide.attach(model, **options) as handle:
        ours = step(model, lambda: model(x))
        assert calls_of(model, x) == calls
        receipt = handle.receipt()
    assert [record.message for record in caplog.records if "CheckpointWrapper" in record.message] != []
    assert len(caplog.records) == 1
    assert receipt.totals["recompute_calls"] == 0
    assert any("CheckpointWrapper, so this handle does nothing" in warning for warning in receipt.warnings)
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name  # type: ignore[arg-type]


def test_whoever_wraps_later_is_told_that_both_recompute() -> None:
    model, x = Chain([Block(8) for _ in range(BLOCKS)]), torch.randn(3, 8)
    with lowtide.attach(model) as handle:
        apply_activation_checkpointing(model, check_fn=is_linear)
        model(x).sum().backward()
        assert any("recomputed by both: attach after" in warning for warning in handle.receipt().warnings)


def test_wrappers_elsewhere_change_nothing() -> None:
    class WithEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.inner = nn.Linear(8, 8), Chain([Block(8) for _ in range(BLOCKS)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.encoder(x))

    model, x = WithEncoder(), torch.randn(3, 8)
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.encoder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lowtide.attach(model) as handle:
            model(x).sum().backward()
            receipt = handle.receipt()
    assert receipt.totals["recompute_calls"] == BLOCKS
    assert receipt.warnings == ()
