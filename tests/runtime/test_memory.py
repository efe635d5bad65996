"""Peak memory over forward and backward (rules 1 to 3), and what a receipt says of bytes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import families
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import loss_of
from tests.runtime.memory import peak_bytes
from tests.runtime.toys import Block, Chain

FAMILIES = ("flux1", "sd3_medium", "wan21_1_3b", "pixart_sigma", "z_image_turbo")


class Checkpointed(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def toy(kind: type[Chain] = Chain) -> Chain:
    torch.manual_seed(0)
    return kind([Block(64) for _ in range(8)])


def peak_of(model: nn.Module) -> int:
    x = torch.randn(2048, 64)

    def run() -> None:
        model(x).sum().backward()

    run()  # gradients exist from here on
    return peak_bytes(run)


def test_toy_peak_is_torchs_at_interval_one_and_as_predicted_beyond() -> None:
    by_torch, plain = peak_of(toy(Checkpointed)), peak_of(toy())
    peaks, held, dropped = {}, {}, {}
    for interval in (1, 2, 4):
        model = toy()
        with lowtide.attach(model, interval=interval) as handle:
            peaks[interval] = peak_of(model)
            totals = handle.receipt().totals
        held[interval], dropped[interval] = totals["kept_bytes"], totals["recomputed_bytes"]
    assert peaks[1] <= by_torch
    for interval in (2, 4):
        # Fewer boundaries, and the working set of n blocks instead of one.
        predicted = peaks[1] - (held[1] - held[interval]) + (interval - 1) * dropped[interval] / 8
        assert peaks[interval] <= predicted * 1.02
    assert peaks[1] < peaks[2] < peaks[4] < plain
    assert held[1] > held[2] > held[4]


@pytest.mark.parametrize("key", FAMILIES)
def test_family_peak_is_at_most_torchs(key: str) -> None:
    family = families.find(key)
    inputs = build_inputs(family.tiny, torch.float32, over={"H": 256, "W": 256})

    def peak(model: nn.Module) -> int:
        def run() -> None:
            loss_of(model(**inputs)).backward()

        run()
        return peak_bytes(run)

    by_torch = build_model(family, "tiny")
    by_torch.enable_gradient_checkpointing(  # type: ignore[operator]
        lambda block, *args, **kwargs: checkpoint(block.__call__, *args, use_reentrant=False, **kwargs)
    )
    ours = build_model(family, "tiny")
    with lowtide.attach(ours):
        assert peak(ours) <= peak(by_torch) + 1024  # a few scalars of 64 bytes each are freed in another order


@pytest.mark.parametrize("setting", [{}, {"interval": 2}, {"interval": 2, "segment_stride": 4}])
def test_held_and_dropped_bytes_are_those_of_a_plain_run(setting: dict[str, int]) -> None:
    model, x = toy(), torch.randn(256, 64)
    with lowtide.attach(model, backend=None) as handle:
        model(x).sum().backward()
        plain = handle.receipt().totals["kept_bytes"]
    with lowtide.attach(model, **setting) as handle:  # type: ignore[arg-type]
        model(x).sum().backward()
        totals = handle.receipt().totals
    assert totals["kept_bytes"] + totals["recomputed_bytes"] == pytest.approx(plain, rel=0.01)
    assert totals["recomputed_bytes"] > 0


def test_bytes_are_counted_again_when_shapes_change() -> None:
    model = toy()
    with lowtide.attach(model) as handle:
        model(torch.randn(64, 64)).sum().backward()
        small = handle.receipt().totals["kept_bytes"]
        model(torch.randn(128, 64)).sum().backward()
        assert handle.receipt().totals["kept_bytes"] == 2 * small


def test_recomputed_value_is_gone_before_its_node_is_left() -> None:
    """Autograd reduces a bias gradient after the node has run and before it releases what the node saved."""
    alive: list[bool] = []

    class Watches(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp())
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            storage = StorageWeakRef(value.untyped_storage())
            del value
            alive.append(not storage.expired())
            return grad

    lowtide.checkpoint(lambda x: Watches.apply(x), torch.randn(4, requires_grad=True)).sum().backward()
    assert alive == [False]
