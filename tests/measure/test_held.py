"""The trace behind every prediction: what a plain forward saves, and where."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import families
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.families import Family, Stack
from lowtide.handle import Handle
from lowtide.measure.build import Size, build_model
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import run_step
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL, HeldTrace, ModuleCall, predict
from lowtide.plan.schedule import ATTENTION, SELECTIVE, Schedule, feed_forwards, keep_all, whole_blocks
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


@pytest.fixture(scope="module", params=families.all_families(), ids=lambda row: row.key)
def both(request):
    """Traces of one row's tiny configuration: on the CPU, and on the meta device."""
    return [_trace(request.param, "tiny", device) for device in ("cpu", "meta")]


def _trace(row: Family, size: Size, device: str, dtype: torch.dtype = torch.float32) -> tuple[HeldTrace, nn.Module]:
    model = build_model(row, size, device=device, dtype=dtype)
    build = row.tiny if size == "tiny" else row.real
    return trace_held(model, resolve(model, row.stacks), build_inputs(build, dtype, device=device)), model


def _figures(trace: HeldTrace) -> list[tuple[object, ...]]:
    """Of every call, those inside others too."""
    return [
        (call.name, call.kind, trace.bytes_of(call.saved), trace.bytes_of(call.all_saved), call.flops)
        for block in trace.calls
        for call in (block, *_inside(block))
    ]


def _inside(call: ModuleCall) -> Iterator[ModuleCall]:
    for inner in call.inner:
        yield inner
        yield from _inside(inner)


def test_the_meta_device_gives_the_same_as_the_fused_kernel_of_the_cpu(both):
    (cpu, _), (meta, _) = both
    assert _figures(cpu) == _figures(meta)
    assert sum(call.flops for call in cpu.calls) > 0
    for what in ("glue", "live"):
        assert cpu.bytes_of(getattr(cpu, what)) == meta.bytes_of(getattr(meta, what))


def test_predictions_do_not_depend_on_the_device(both):
    held = []
    for trace, model in both:
        stacks = resolve(model, families.by_class(type(model).__name__).stacks)
        depths = {stack.name: len(stack.blocks) for stack in stacks}
        held.append([predict(trace, schedule, 0) for schedule in _schedules(depths)])
    assert held[0] == held[1]
    assert held[0][1].cpu_bytes > 0 and held[0][2].cpu_bytes > 0


def _schedules(depths: dict[str, int]) -> Iterator[Schedule]:
    yield Schedule({name: whole_blocks(depth, 2) for name, depth in depths.items()})
    yield Schedule({name: feed_forwards(depth).moving({ATTENTION}) for name, depth in depths.items()})
    selective = {name: whole_blocks(depth, treatment=SELECTIVE) for name, depth in depths.items()}
    yield Schedule({name: stack.moving({ATTENTION}) for name, stack in selective.items()})


# ---------------------------------------------------------------------- attention


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.derived = False  # the mask, inside

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = mask & mask if self.derived and mask is not None else mask
        heads = self.project(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


class _AttendingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = _Attention(width)
        self.ff = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return hidden + self.ff(self.attn(self.norm(hidden), mask)).sin()


class _AttendingModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_AttendingBlock(width) for _ in range(2))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, mask)
        return nn.functional.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None]).sum()


BATCH, TOKENS = 2, 5
HIDDEN = BATCH * TOKENS * WIDTH * 4
ROW_SUMS = BATCH * 2 * TOKENS * 4  # one float a head and token


def _attending(feed_forward, attention, device="cpu", mask=None, derived=False):
    model = _AttendingModel().to(device)
    for block in model.blocks:
        block.attn.derived = derived
    stacks = resolve(model, (Stack("blocks", ("blocks.*",), feed_forward, attention),))
    return trace_held(model, stacks, {"hidden": torch.randn(BATCH, TOKENS, WIDTH, device=device), "mask": mask})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_sides_and_kernels_are_calls_inside_the_block(device):
    trace = _attending((("ff",),), ("attn",), device)
    for block in trace.calls:
        side, feed_forward = block.inner
        assert (side.kind, side.name) == (ATTENTION_SIDE, f"{block.name}.attn")
        assert (feed_forward.kind, feed_forward.name) == (FEED_FORWARD, f"{block.name}.ff")
        (kernel,) = side.inner
        assert kernel.kind == KERNEL and list(block.outermost(KERNEL)) == [kernel]
        assert trace.bytes_of(kernel.results) == HIDDEN + ROW_SUMS
        assert trace.bytes_of(side.saved) == HIDDEN  # the projection's argument
        assert trace.bytes_of(side.all_saved) == HIDDEN + 3 * HIDDEN + HIDDEN + ROW_SUMS
    assert trace.bytes_of(trace.glue) > 0, "the kernel outside of all blocks is glue"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_boolean_mask_counts_as_the_additive_one_that_torch_makes_of_it(device, where):
    """It is a result of the kernel, unless it can be made again, from a mask that is made inside the block."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device)
    trace = _attending((), ("attn",), device, mask, derived=where == "inside")
    added = TOKENS * TOKENS * 4
    for block in trace.calls:
        (kernel,) = block.outermost(KERNEL)
        assert trace.bytes_of(kernel.all_saved) == 3 * HIDDEN + HIDDEN + ROW_SUMS + added
        assert trace.bytes_of(kernel.results) == HIDDEN + ROW_SUMS + (added if where == "outside" else 0)


def test_a_module_of_two_sides_is_traced_as_a_part_of_both():
    trace = _attending((("norm", "ff"),), ("norm", "attn"))
    sides = list(trace.calls[0].outermost(ATTENTION_SIDE))
    assert [side.name for side in sides] == ["blocks.0.norm", "blocks.0.attn"]
    chain = list(trace.calls[0].outermost(FEED_FORWARD))
    assert [call.name for call in chain] == ["blocks.0.norm", "blocks.0.ff"]
    assert trace.bytes_of(sides[0].all_saved) == HIDDEN + 2 * BATCH * TOKENS * 4  # the argument and its statistics
    assert sides[0].all_saved == chain[0].all_saved


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_of_another_width_than_queries_are_traced_as_torch_runs_them(device):
    class Wide(_Attention):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            heads = hidden[:, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads[..., :4]).squeeze(1).repeat(1, 1, 2)

    model = _AttendingModel().to(device)
    for block in model.blocks:
        block.attn = Wide(WIDTH).to(device)
    trace = trace_held(
        model,
        resolve(model, (Stack("blocks", ("blocks.*",), (), ("attn",)),)),
        {"hidden": torch.randn(BATCH, TOKENS, WIDTH, device=device)},
    )
    (kernel,) = trace.calls[0].outermost(KERNEL)
    assert trace.bytes_of(kernel.all_saved) > 0


class _Reader(nn.Module):
    def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden * hidden.sum().item(), hidden


class _Repeating(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rows < 0:
            raise ValueError("more than nothing is needed")
        return hidden.new_empty(self.rows, WIDTH).sum() + hidden, hidden


class _NeedsMore(nn.Module):
    def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return transforms.resize(hidden), hidden  # noqa: F821  # pyright: ignore


def test_a_forward_that_reads_values_says_where_and_that_it_cannot_run_on_the_meta_device():
    model = _Model().to("meta")
    stacks = resolve(model, STACKS)
    model.blocks[1].ff = _Reader()
    hidden = torch.empty(ROWS, WIDTH, device="meta")
    with pytest.raises(ConfigError, match=r"_Model cannot run on the meta device: in blocks\.1\.ff, it reads values "):
        trace_held(model, stacks, {"hidden": hidden})


@pytest.mark.parametrize(
    ("rows", "message"),
    [(2**62, "_Model cannot be this large: "), (-1, "the forward of _Model does not take these inputs: more than ")],
)
def test_sizes_that_no_memory_holds_or_the_model_refuses(rows, message):
    model = _Model().to("meta")
    stacks = resolve(model, STACKS)
    model.blocks[1].ff = _Repeating(rows)
    with pytest.raises(ConfigError, match=message):
        trace_held(model, stacks, {"hidden": torch.empty(ROWS, WIDTH, device="meta")})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_that_lacks_a_library_says_so(device):
    model = _Model().to(device)
    model.blocks[1] = _NeedsMore()
    with pytest.raises(ConfigError, match="name 'transforms' is not defined. Is a library that it needs not installed"):
        trace_held(model, resolve(model, STACKS), {"hidden": torch.empty(ROWS, WIDTH, device=device)})


def test_a_buffer_in_cpu_memory_counts_nothing_on_the_meta_device_either():
    class WithTable(_Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2 * ROWS, WIDTH, device="cpu"))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * self.table[:ROWS]

    traces = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = WithTable()
        traces.append(trace_held(model, resolve(model, STACKS), {"hidden": torch.empty(ROWS, WIDTH, device=device)}))
    assert _figures(traces[0]) == _figures(traces[1])
    assert [trace.bytes_of(trace.glue) for trace in traces] == [2 * TENSOR, 2 * TENSOR]


# ---------------------------------------------------------------------- the carry


class _Carrying(nn.Module):
    """Besides its carry x it takes text, which is larger and new for every block."""

    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return x + self.ff(x) * text.mean(0)


class _CarryingModel(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Carrying() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(hidden)
        text = hidden.repeat(3, 1)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, text=text * index)
        return hidden


@pytest.mark.parametrize(("carry", "segments"), [((), 4), (("x",), 2), (("x", "text"), 4), (("gone",), 4)])
def test_where_a_row_names_the_carry_it_decides_in_the_trace_as_in_a_run(carry, segments):
    model, hidden = _CarryingModel(), torch.randn(ROWS, WIDTH)
    rows = (Stack("blocks", ("blocks.*",), (("ff",),), carry=carry),)
    trace = trace_held(model, resolve(model, rows), {"hidden": hidden})
    assert all(len(call.carry) == len(set(carry) & {"x", "text"}) for call in trace.calls)
    schedule = _schedule(whole_blocks(4, 2))
    held = predict(trace, schedule)
    assert len(held.segments) == segments
    with Handle(model, resolve(model, rows), schedule, CheckpointConfig()) as handle:
        model(hidden).sum().backward()
        receipt = handle.receipt()
    assert len({block.segment for block in receipt.blocks}) == segments
    assert receipt.totals["kept_bytes"] == held.kept_bytes
    assert receipt.totals["recomputed_bytes"] == held.recomputed_bytes


@pytest.mark.parametrize("over", [{}, {"T": 400}], ids=["text smaller than the image", "text larger than the image"])
def test_segments_of_stable_cascade_are_as_wide_as_the_schedule_says(over):
    row = families.find("stable_cascade_c")
    model, inputs = build_model(row), build_inputs(row.tiny, over=over)
    stacks = resolve(model, row.stacks)
    schedule = Schedule({"micro_blocks": whole_blocks(30, 3)})
    held = predict(trace_held(model, stacks, inputs), schedule)
    assert [len(segment) for segment in held.segments] == [3] * 10
    with Handle(model, stacks, schedule, CheckpointConfig()) as handle:
        run_step(model, inputs)
        totals = handle.receipt().totals
    assert (totals["kept_bytes"], totals["recomputed_bytes"]) == (held.kept_bytes, held.recomputed_bytes)
