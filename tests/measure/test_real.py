"""Rows at their real configuration, without memory for weights or activations: about a second each."""

from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL, predict
from lowtide.plan.schedule import Schedule, whole_blocks
from lowtide.runtime.resolve import resolve
from tests.contract.conftest import EVERY_MODE

KINDS = (FEED_FORWARD, ATTENTION_SIDE, KERNEL)
MASK_NEEDS_TORCHVISION = {"cosmos2_image", "anima"}
READ_VALUES = ("lumina2", "flux3_klein", "hidream", "omnigen", "qwen_image_21", "hunyuan_video_15", "cosmos2_image")
"""Rows whose forwards ask for values, or that need something else of their own: always traced. Of the others a fourth
is, unless LOWTIDE_EVERY_MODE is set: together they take a minute."""
ROWS = [
    row for number, row in enumerate(families.all_families()) if EVERY_MODE or row.key in READ_VALUES or not number % 4
]


def _without_mask(row: Family) -> Family:
    real = replace(row.real, config=row.real.config | {"concat_padding_mask": False}, vars=row.real.vars | {"M": 0})
    return replace(row, real=real)


def _traced(row: Family):
    model = build_model(row, "real", device="meta", dtype=torch.bfloat16)
    stacks = resolve(model, row.stacks)
    return model, stacks, trace_held(model, stacks, build_inputs(row.real, torch.bfloat16, device="meta"))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # Kandinsky 5 in bfloat16
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_what_the_real_model_holds_is_known_without_running_it(row):
    if row.key in MASK_NEEDS_TORCHVISION and find_spec("torchvision") is None:
        with pytest.raises(ConfigError, match="'transforms' is not defined. Is a library that it needs not installed"):
            _traced(row)
        row = _without_mask(row)
    model, stacks, trace = _traced(row)
    called = {call.name for call in trace.calls}
    left_out = {name for stack in stacks for name, _ in stack.blocks} - called
    assert left_out == set() or row.key == "flux3_klein", "it has blocks for conditions that are not given"

    figures = defaultdict(set)
    for call in trace.calls:
        block = model.get_submodule(call.name)
        weights = tuple(weight.shape for weight in block.parameters())
        given = tuple((use.elements, use.requires_grad) for use in call.arguments)
        of_sides = tuple(side.flops for kind in KINDS for side in call.outermost(kind))
        figures[call.stack, weights, given].add((trace.bytes_of(call.all_saved), call.flops, of_sides))
        assert trace.bytes_of(call.all_saved) > 0
        assert call.flops >= sum(side.flops for side in call.outermost(FEED_FORWARD))
        assert call.flops > sum(kernel.flops for kernel in call.outermost(KERNEL))
    assert all(len(alike) == 1 for alike in figures.values()), figures

    held = predict(trace, Schedule({stack.name: whole_blocks(len(stack.blocks)) for stack in stacks}))
    assert 0 < held.held_bytes < held.plain_bytes / 2
    assert held.plain_bytes > 2**28
