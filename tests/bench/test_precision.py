"""Quantised weights: fewer bytes, nearly the same product, and a gradient for what is trained on them."""

import pytest
import torch
from torch import nn

from lowtide.bench.precision import PRECISIONS, quantise
from lowtide.errors import ConfigError


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("precision", ["int8-sdnq", "int8-sdnq-hadamard"])
def test_sdnq_is_near_and_passes_gradients(precision: str) -> None:
    model, x = layers(), torch.randn(16, 256, dtype=torch.bfloat16, requires_grad=True)
    plain = model(x)
    (gradient,) = torch.autograd.grad(plain.sum(), x)
    quantise(model, precision)
    assert "SDNQ" in type(model[0].weight).__name__  # type: ignore[index]
    output = model(x)
    (found,) = torch.autograd.grad(output.sum(), x)
    for value, expected in ((output, plain), (found, gradient)):
        error = ((value - expected).float().norm() / expected.float().norm()).item()
        assert 0 < error < 0.05


def test_bf16_leaves_the_weights_alone() -> None:
    model = layers()
    before = [weight.clone() for weight in model.parameters()]
    quantise(model, "bf16")
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_an_unknown_precision_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=f"unknown precision 'int4'; allowed: {', '.join(PRECISIONS)}"):
        quantise(layers(), "int4")
