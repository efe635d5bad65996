"""Casts of trained weights lie there when the forward ends, whatever becomes of activations."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import families
from lowtide.bench.synthetic import Synthetic
from lowtide.families.row import Stack
from lowtide.measure.build import build_model
from lowtide.measure.cards import find_card
from lowtide.measure.cast_weights import with_casts
from lowtide.measure.casting import Casting
from lowtide.measure.forecast import forecast
from lowtide.measure.inputs import build_inputs
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SAVED, SELECTIVE, WHOLE
from lowtide.runtime.resolve import resolve

WIDTH = 32
ATTENTION_CASTS, FEED_FORWARD_CASTS = 2 * (4 * WIDTH**2 + 4 * WIDTH), 2 * (8 * WIDTH**2 + 5 * WIDTH)


class Casts(TorchDispatchMode):
    """Watches what becomes of bfloat16 copies of the shapes of some weights."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(weight.shape) for weight in weights}
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and output.dtype is torch.bfloat16
        if cast and tuple(output.shape) in self.shapes:
            self.made.append((StorageWeakRef(output.untyped_storage()), output.nbytes))
        return output

    @property
    def alive_bytes(self) -> int:
        return sum(size for storage, size in self.made if not storage.expired())


def test_each_treatment_counts_the_casts_that_it_does_not_keep() -> None:
    with torch.device("meta"):
        model = Synthetic(3, WIDTH, 2)
    stacks = resolve(model, (Stack("blocks", ("blocks.*",), (("ff",),), ("attn",)),))
    with Casting(torch.device("cuda")):
        costs = forecast(
            model, stacks, {"x": torch.empty(1, 16, WIDTH, device="meta")}, find_card("H200"), 0, min_bytes=1
        )
    counted = with_casts(costs, stacks)
    (before,), (after,) = costs.kinds.values(), counted.kinds.values()
    both = ATTENTION_CASTS + FEED_FORWARD_CASTS
    expected = {
        (KEPT, frozenset()): 0,
        (KEPT, frozenset({ATTENTION})): ATTENTION_CASTS,
        (KEPT, frozenset({SAVED})): both,
        (FFN, frozenset()): FEED_FORWARD_CASTS,
        (FFN, frozenset({ATTENTION})): both,
        (WHOLE, frozenset()): both,
        (WHOLE, frozenset({BOUNDARY})): both,
        (SELECTIVE, frozenset()): both,
    }
    found = {
        (now.treatment, now.moves): now.kept_bytes - then.kept_bytes
        for then, now in zip(before.treatments, after.treatments, strict=True)
        if now.blocks == 1
    }
    assert {way: found[way] for way in expected} == expected
    pair = next(now for now in after.treatments if (now.treatment, now.blocks) == (WHOLE, 2))
    alone = next(now for now in before.treatments if (now.treatment, now.blocks) == (WHOLE, 2))
    assert pair.kept_bytes - alone.kept_bytes == 2 * both


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_keeps_them_until_the_forward_is_over() -> None:
    """Of blocks that are recomputed, too."""
    row = families.find("wan21_1_3b")
    model, inputs = build_model(row, "tiny"), build_inputs(row.tiny, torch.float32)
    (stack,) = resolve(model, row.stacks)
    linear = [module for _, block in stack.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    least_bytes = sum(2 * module.weight.numel() for module in linear)
    with lowtide.attach(model, backend="torch"), Casts([module.weight for module in linear]) as casts:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs)
            assert casts.alive_bytes >= least_bytes
        assert casts.alive_bytes < least_bytes
        del output
