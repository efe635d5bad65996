"""torch.compile: compiled blocks run inside segments; under a compiled model the blocks run eagerly, and it is said."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import Unsupported

import lowtide
from lowtide.testing import cpu_offload
from tests.integration.models import assert_recomputed, assert_same, blocks, build, inputs, step

KEY = "wan21_1_3b"

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Compiler:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs += 1
        return self.backend(graph, examples)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def each_block(model: nn.Module, compiler: Compiler) -> nn.Module:
    for block in blocks(model):
        block.compile(backend=compiler, fullgraph=True)
    return model


def repeated_blocks(model: Any, compiler: Compiler) -> nn.Module:
    model.compile_repeated_blocks(fullgraph=True, backend=compiler)
    return model


def replaced_blocks(model: Any, compiler: Compiler) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=compiler)
    return model


def whole_model(model: nn.Module, compiler: Compiler) -> nn.Module:
    return torch.compile(model, backend=compiler)  # type: ignore[return-value]


def model_in_place(model: nn.Module, compiler: Compiler) -> nn.Module:
    model.compile(backend=compiler)
    return model


def attached(
    prepare: Callable[..., Any], compiler: Compiler, attach_first: bool, depth: int = 4, **options: Any
) -> Any:
    model = build(KEY, depth)
    if attach_first:
        handle = lowtide.attach(model, **options)
        return prepare(model, compiler), handle
    model = prepare(model, compiler)
    return model, lowtide.attach(model, **options)


order = pytest.mark.parametrize("attach_first", [True, False], ids=["attach first", "compile first"])


@order
@pytest.mark.parametrize("prepare", [each_block, repeated_blocks])
def test_compiled_blocks_are_recomputed_compiled(prepare: Callable[..., Any], attach_first: bool) -> None:
    depth = torch._dynamo.config.recompile_limit + 2
    expected = step(prepare(build(KEY, depth), Compiler()), KEY)
    torch._dynamo.reset()
    compiler = Compiler()
    model, handle = attached(prepare, compiler, attach_first, depth, interval=2)
    model(**inputs(KEY))
    assert compiler.graphs == 1, "one class of blocks is one graph"
    for _ in range(2):
        assert_same(expected, step(model, KEY))
        assert not assert_recomputed(handle, width=2).warnings
    assert compiler.graphs == 1, "recomputing compiles nothing"
    handle.detach()
    assert_same(expected, step(model, KEY))


@order
@pytest.mark.parametrize("prepare", [each_block, repeated_blocks])
def test_offload_leaves_compiled_blocks_whole(prepare: Callable[..., Any], attach_first: bool) -> None:
    """The block that runs last is kept, and tells that the rest is wanted; nothing reaches into it for that."""
    expected = step(prepare(build(KEY, 8), Compiler()), KEY)
    torch._dynamo.reset()
    compiler = Compiler()
    setting = {"backend": "unsloth", "interval": 2, "segment_stride": 4, "offload_min_bytes": 1}
    with cpu_offload():
        model, handle = attached(prepare, compiler, attach_first, 8, **setting)
        for _ in range(3):
            assert_same(expected, step(model, KEY))
            copies = handle.receipt().copies
            assert copies.prefetch_misses == 0 < copies.h2d_bytes == copies.d2h_bytes
            assert handle.receipt().blocks[-1].treatment == "kept"
    assert compiler.graphs == 1


def test_dropout_in_compiled_blocks_is_recomputed_as_it_was() -> None:
    def with_dropout() -> Any:
        model = build(KEY)
        model.add_adapter(LoraConfig(lora_dropout=0.5, init_lora_weights=False, target_modules=["to_q", "to_v"]))
        return each_block(model.train(), Compiler())

    torch.manual_seed(1)
    expected = step(with_dropout(), KEY)
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = with_dropout()
    with lowtide.attach(model, interval=2) as handle:
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)
        assert step(model, KEY, seed=1).loss != expected.loss


def test_replaced_blocks_attached_afterwards_are_recomputed_compiled() -> None:
    expected = step(replaced_blocks(build(KEY), Compiler()), KEY)
    torch._dynamo.reset()
    compiler = Compiler()
    model, handle = attached(replaced_blocks, compiler, attach_first=False, interval=2)
    for _ in range(2):
        assert_same(expected, step(model, KEY))
        assert not assert_recomputed(handle, width=2).warnings
    assert compiler.graphs == 1


def test_blocks_replaced_by_compiled_ones_after_attach_are_reported() -> None:
    expected = step(build(KEY), KEY)
    model, handle = attached(replaced_blocks, Compiler("eager"), attach_first=True, interval=2)
    assert_same(expected, step(model, KEY))
    compiled, replaced = assert_recomputed(handle, width=2).warnings
    assert "4 blocks (blocks.0 the first) were called from code under torch.compile" in compiled
    assert "4 modules (blocks.0 the first, now of class OptimizedModule)" in replaced


def test_a_block_replaced_by_another_module_after_attach_is_reported_as_not_called() -> None:
    twin = build(KEY)
    expected = step(twin, KEY)
    model = build(KEY)
    handle = lowtide.attach(model, interval=2)
    model.blocks[1] = torch.compile(twin.blocks[1], backend="eager")
    assert_same(expected, step(model, KEY))
    receipt = handle.receipt()
    assert [block.reason for block in receipt.blocks] == [None, "not called", None, None]
    assert [block.recompute_calls for block in receipt.blocks] == [1, 0, 1, 1]
    assert "1 modules (blocks.1 the first, now of class OptimizedModule)" in receipt.warnings[0]


@order
@pytest.mark.parametrize("prepare", [whole_model, model_in_place])
def test_under_a_compiled_model_blocks_run_eagerly_and_the_receipt_says_so(
    prepare: Callable[..., Any], attach_first: bool
) -> None:
    expected = step(build(KEY), KEY)
    compiler = Compiler()
    model, handle = attached(prepare, compiler, attach_first, interval=2)
    for _ in range(2):
        assert_same(expected, step(model, KEY))
        (warning,) = assert_recomputed(handle, width=2).warnings
        assert "ran eagerly" in warning
    graphs = compiler.graphs
    assert graphs > 0, "what is around the blocks is compiled"
    step(model, KEY)
    assert compiler.graphs == graphs, "no step compiles anything anew"


def test_a_model_that_ran_compiled_before_it_is_attached() -> None:
    model = whole_model(build(KEY), Compiler("eager"))
    expected = step(model, KEY)
    with lowtide.attach(model, interval=2) as handle:
        assert_same(expected, step(model, KEY))
        assert assert_recomputed(handle, width=2).warnings
    assert_same(expected, step(model, KEY))


def test_without_gradients_a_compiled_model_gives_the_same_output() -> None:
    model, _ = attached(whole_model, Compiler("eager"), attach_first=True)
    with torch.no_grad():
        expected = build(KEY)(**inputs(KEY)).sample
        assert torch.equal(expected, model(**inputs(KEY)).sample)


@order
def test_feed_forward_sides_of_compiled_blocks(attach_first: bool) -> None:
    """The side is cut out of the compiled block: what is around it stays compiled."""

    def prepare(model: Any, compiler: Compiler) -> nn.Module:
        model.compile_repeated_blocks(backend=compiler)
        return model

    expected = step(build(KEY), KEY)
    compiler = Compiler("eager")
    model, handle = attached(prepare, compiler, attach_first, backend="torch-ffn")
    for _ in range(2):
        assert_same(expected, step(model, KEY))
        receipt = handle.receipt()
        assert [block.recompute_calls for block in receipt.blocks] == [1] * 4
        assert "ran eagerly" in receipt.warnings[0]
    graphs = compiler.graphs
    assert graphs > 1
    step(model, KEY)
    assert compiler.graphs == graphs


def test_a_full_graph_over_the_blocks_is_refused_by_name() -> None:
    model = build(KEY)
    lowtide.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="lowtide"):
        compiled(**inputs(KEY))
