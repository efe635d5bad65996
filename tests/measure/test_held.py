"""The trace behind every prediction: what a plain forward saves, and where."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families import Stack
from lowtide.measure.build import build_model
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.plan.held import predict
from lowtide.plan.schedule import Schedule, feed_forwards, keep_all, whole_blocks
from lowtide.runtime.resolve import resolve


class _Block(nn.Module):
    """norm → ff beside a product; saves its argument, the norm's output and the sigmoid's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden + self.ff(self.norm(hidden)).sigmoid(), unused.exp()


class _Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(hidden)
        unused = hidden * 2
        for block in self.blocks:
            hidden, unused = block(hidden, unused)
        return hidden.sin()


WIDTH, ROWS = 8, 16
TENSOR = WIDTH * ROWS * 4
STACKS = (Stack("blocks", ("blocks.*",), (("norm", "ff"),)),)


@pytest.fixture
def traced():
    model = _Model()
    stacks = resolve(model, STACKS)
    return trace_held(model, stacks, {"hidden": torch.randn(ROWS, WIDTH)})


def _schedule(stack) -> Schedule:
    return Schedule({"blocks": stack})


def test_calls_come_in_order_with_their_feed_forward_inside(traced):
    assert [call.name for call in traced.calls] == [f"blocks.{index}" for index in range(4)]
    first = traced.calls[0]
    assert [(call.name, call.index) for call in first.inner] == [("blocks.0.norm", 0), ("blocks.0.ff", 1)]
    assert first.inner[0].outputs[0].tensor == first.inner[1].arguments[0].tensor
    assert first.outputs[0].tensor == traced.calls[1].arguments[0].tensor


def test_bytes_are_those_of_distinct_storages_without_weights(traced):
    assert traced.bytes_of(traced.glue) == 2 * TENSOR  # the model's input and sin's argument
    statistics = 2 * ROWS * 4
    feed_forward = (
        TENSOR + TENSOR + statistics + 2 * 4 * TENSOR
    )  # norm's argument and output, GELU's argument and output
    assert traced.bytes_of(traced.calls[1].inner[0].saved | traced.calls[1].inner[1].saved) == feed_forward
    assert traced.bytes_of(traced.calls[1].saved) == 2 * TENSOR  # sigmoid's output and exp's


def test_what_dies_unused_is_not_held(traced):
    exponentials = {next(iter(call.outputs[1:])).storage for call in traced.calls}
    assert exponentials <= set().union(*(call.saved for call in traced.calls))
    assert not exponentials & traced.live


def test_predictions_by_hand(traced):
    statistics = 2 * ROWS * 4
    # a block: its argument, the norm's output and statistics, GELU's argument and output, the sigmoid's output
    block = TENSOR + TENSOR + statistics + 8 * TENSOR + TENSOR
    plain = 2 * TENSOR + 4 * block
    assert predict(traced, _schedule(keep_all(4))).held_bytes == plain
    assert predict(traced, _schedule(keep_all(4))).plain_bytes == plain
    # every block's two arguments: hidden and `unused`
    assert predict(traced, _schedule(whole_blocks(4))).held_bytes == 2 * TENSOR + 4 * 2 * TENSOR
    assert predict(traced, _schedule(whole_blocks(4, 2))).held_bytes == 2 * TENSOR + 2 * 2 * TENSOR
    assert predict(traced, _schedule(whole_blocks(4, 4))).held_bytes == 2 * TENSOR + 2 * TENSOR
    assert predict(traced, _schedule(whole_blocks(4, 1, 2))).held_bytes == 2 * TENSOR + 2 * block + 2 * 2 * TENSOR
    # norm → ff is one run: its argument and the sigmoid's output stay
    assert predict(traced, _schedule(feed_forwards(4))).held_bytes == 2 * TENSOR + 4 * 2 * TENSOR


def test_segments_are_named(traced):
    whole = predict(traced, _schedule(whole_blocks(4, 3)))
    assert whole.segments == (("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",))
    narrow = predict(traced, _schedule(feed_forwards(4, 3)))
    assert narrow.segments == (("blocks.0.norm", "blocks.0.ff"), ("blocks.3.norm", "blocks.3.ff"))


def test_tracing_leaves_neither_hooks_nor_memory_behind():
    model = _Model()
    trace_held(model, resolve(model, STACKS), {"hidden": torch.randn(ROWS, WIDTH)})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    seen = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.randn(ROWS, WIDTH))
    assert seen, "hooks outside work again"


@pytest.mark.parametrize("row", [r for r in families.all_families() if r.key != "lumina2"], ids=lambda row: row.key)
def test_the_meta_device_gives_the_same_segments_and_boundaries(row):
    traces = []
    for device in ("cpu", "meta"):
        model = build_model(row, device=device)
        stacks = resolve(model, row.stacks)
        schedule = Schedule({stack.name: whole_blocks(len(stack.blocks), 2) for stack in stacks})
        traces.append(predict(trace_held(model, stacks, build_inputs(row.tiny, device=device)), schedule))
    assert traces[0].segments == traces[1].segments
    assert traces[0].held_bytes == traces[1].held_bytes


def test_a_forward_that_reads_values_says_that_it_cannot_run_on_the_meta_device():
    row = families.find("lumina2")
    model = build_model(row, device="meta")
    with pytest.raises(ConfigError, match="Lumina2Transformer2DModel reads values of its inputs"):
        trace_held(model, resolve(model, row.stacks), build_inputs(row.tiny, device="meta"))
