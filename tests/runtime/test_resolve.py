"""What structure alone shows of a block: its sublayers and the norms that feed them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

import lowtide
from lowtide.families.row import Stack
from lowtide.runtime.resolve import ResolvedStack, resolve
from tests.runtime.toys import Chain, assert_equal, assert_same_as_plain, step

WIDTH, ROWS = 16, 6
TENSOR = WIDTH * ROWS * 4
STATISTICS = 2 * ROWS * 4
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, ROWS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, WIDTH))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class PreNorm(nn.Module):
    """norms: makes a norm. names: of the two norms, in the order in which they run."""

    def __init__(
        self, names: tuple[str, str] = ("norm1", "norm2"), norms: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, norms() if norms is not None else nn.LayerNorm(WIDTH))
        self.attn = Attention()
        self.ff = feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        x = x + self.attn(first(x))
        return x + self.ff(second(x))


class Modulated(PreNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        x = x + self.attn(first(x))
        return x + self.ff(second(x) * (1 + x.mean()) + 0.5)


class PostNorm(PreNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        x = first(x + self.attn(x))
        return second(x + self.ff(x))


class Parallel(PreNorm):
    """The second norm feeds both sides, the first one the attention's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        y = second(x)
        return x + first(self.attn(y)) + self.ff(y)


def model(kind: type[PreNorm], *args: Any) -> Chain:
    torch.manual_seed(0)
    return Chain([kind(*args) for _ in range(3)])


def tokens() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def found(model: nn.Module) -> ResolvedStack:
    (stack,) = resolve(model, None)
    return stack


# ---------------------------------------------------------------------- norms of models that no row knows

TEXT_MODELS = {
    "llama": (
        lambda: LlamaModel(LlamaConfig(**TEXT, num_key_value_heads=2)),
        ("post_attention_layernorm", "mlp"),
        ("input_layernorm",),
    ),
    "clip": (lambda: CLIPTextModel(CLIPTextConfig(**TEXT)), ("layer_norm2", "mlp"), ("layer_norm1",)),
}


@pytest.mark.parametrize(("make", "chain", "norms"), TEXT_MODELS.values(), ids=TEXT_MODELS)
def test_norms_of_text_models_are_found_and_hand_their_output_on(
    make: Callable[[], nn.Module], chain: tuple[str, ...], norms: tuple[str, ...]
) -> None:
    text_model = make()
    stack = found(text_model)
    assert stack.row.feed_forward == (chain,)
    assert stack.row.attention_norms == norms
    (_, block), *_ = stack.blocks
    given: dict[str, Any] = {}
    for name in chain:
        block.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: given.update({name: (args[0], output)})
        )
    text_model(input_ids=torch.arange(12).view(1, 12))
    assert given[chain[0]][1] is given[chain[1]][0]


def test_norms_are_paired_by_number_where_they_are_registered_in_another_order() -> None:
    class Reversed(PreNorm):
        def __init__(self) -> None:
            super().__init__(("norm2", "norm1"))

    assert found(model(Reversed)).row.feed_forward == (("norm2", "ff"),)


def _with_a_third_norm() -> nn.Module:
    blocks = model(PreNorm)
    for block in blocks.blocks:
        block.add_module("norm_out", nn.LayerNorm(WIDTH))
    return blocks


UNPAIRED = {
    "another number of norms": (_with_a_third_norm, ()),
    "norms without weights": (lambda: model(PreNorm, ("norm1", "norm2"), _without_weights), ("norm1",)),
    "batch norm": (lambda: model(PreNorm, ("norm1", "norm2"), lambda: nn.BatchNorm1d(WIDTH)), ("norm1",)),
}


def _without_weights() -> nn.Module:
    return nn.LayerNorm(WIDTH, elementwise_affine=False)


@pytest.mark.parametrize(("make", "norms"), UNPAIRED.values(), ids=UNPAIRED)
def test_a_norm_that_cannot_be_told_to_feed_the_feed_forward_is_left_out(
    make: Callable[[], nn.Module], norms: tuple[str, ...]
) -> None:
    row = found(make()).row
    assert row.feed_forward == (("ff",),)
    assert row.attention_norms == norms


@pytest.mark.parametrize("names", [("attn_norm", "ffn_norm"), ("ln_1", "ln_2")])
def test_norms_are_told_by_name_and_by_class(names: tuple[str, str]) -> None:
    row = found(model(PreNorm, names)).row
    assert (row.feed_forward, row.attention, row.attention_norms) == (((names[1], "ff"),), ("attn",), (names[0],))


# ---------------------------------------------------------------------- what the engine makes of the pairs


def _ffn_bytes(blocks: Chain) -> tuple[int, int]:
    """Kept and recomputed, of a step whose gradients are those of a plain one."""
    x = tokens()
    receipt = assert_same_as_plain(blocks, lambda: blocks(x), recomputed=3, backend="torch-ffn")
    return receipt.totals["kept_bytes"], receipt.totals["recomputed_bytes"]


@pytest.mark.parametrize("kind", [PreNorm, Modulated, PostNorm, Parallel])
def test_a_pair_right_or_wrong_keeps_gradients_and_holds_no_more_than_the_feed_forward_alone(
    kind: type[PreNorm],
) -> None:
    paired, bare = model(kind), model(kind, ("before", "after"))
    paired_row, bare_row = found(paired).row, found(bare).row
    assert paired_row.feed_forward == (("norm2", "ff"),)
    for block in bare.blocks:
        block.add_module("norm3", nn.LayerNorm(WIDTH))  # unused: now the counts differ
    bare_row = found(bare).row
    assert bare_row.feed_forward == (("ff",),)
    kept, recomputed = _ffn_bytes(paired)
    kept_bare, recomputed_bare = _ffn_bytes(bare)
    saved = {PreNorm: 3 * (TENSOR + STATISTICS)}.get(kind, 3 * STATISTICS)
    assert kept == kept_bare - saved
    assert recomputed == recomputed_bare + saved


def test_attention_sides_are_those_that_the_block_has() -> None:
    class Mixed(nn.Module):
        """Micro-blocks of a U-Net: both kinds have a norm1, of which one feeds attention."""

        def __init__(self) -> None:
            super().__init__()
            resnet = nn.Module()
            resnet.norm1, resnet.conv1, resnet.conv2 = nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.blocks = nn.ModuleList([resnet, PreNorm()])

    row = Stack("blocks", ("blocks.*",), (("norm2", "ff"),), ("attn", "attn2"), ("norm1", "norm1_context"))
    (stack,) = resolve(Mixed(), (row,))
    (_, resnet), (_, transformer) = stack.blocks
    assert stack.attention_sides(resnet) == []
    assert stack.attention_sides(transformer) == [
        ("norm1", transformer.get_submodule("norm1")),
        ("attn", transformer.get_submodule("attn")),
    ]
    assert stack.has_attention
    (without,) = resolve(Mixed(), (Stack("blocks", ("blocks.0",)),))
    assert not without.has_attention


def test_a_norm_that_stands_in_a_block_twice_is_one_module_of_its_attention_side() -> None:
    blocks = model(PreNorm)
    for block in blocks.blocks:
        block.add_module("norm1_context", block.get_submodule("norm1"))
    row = Stack("blocks", ("blocks.*",), (), ("attn",), ("norm1", "norm1_context"))
    (stack,) = resolve(blocks, (row,))
    assert [path for path, _ in stack.attention_sides(stack.blocks[0][1])] == ["norm1", "attn"]


# ---------------------------------------------------------------------- where blocks of one stack stand


class Numbered(nn.Module):
    """Blocks that are attributes: ``block1``, ``block2``; what else has a number is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = feed_forward(), feed_forward()
        for number in (1, 2, 3):
            self.add_module(f"block{number}", PreNorm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block3(self.block2(self.block1(x)))


class Turns(nn.Module):
    """Micro-blocks of two kinds in turn, in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([PreNorm(), Attention(), PreNorm(), Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.steps:
            x = part(x)
        return x


class Inline(nn.Module):
    """A block that calls the layers of its feed-forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.proj_mlp, self.act_mlp = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.proj_out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x) + self.proj_out(self.act_mlp(self.proj_mlp(x)))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = PreNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize(
    ("make", "name", "paths"),
    [
        (Numbered, "block*", ["block1", "block2", "block3"]),
        (Turns, "steps", ["steps.0", "steps.1", "steps.2", "steps.3"]),
    ],
)
def test_stacks_that_are_no_list_of_one_class(make: Callable[[], nn.Module], name: str, paths: list[str]) -> None:
    torch.manual_seed(0)
    blocks, x = make(), tokens()
    stack = found(blocks)
    assert (stack.name, [path for path, _ in stack.blocks]) == (name, paths)
    assert_same_as_plain(blocks, lambda: blocks(x), recomputed=len(paths))


def test_layers_called_inline_are_one_feed_forward_side() -> None:
    stack = found(Chain([Inline() for _ in range(2)]))
    assert stack.row.feed_forward == (("proj_mlp", "act_mlp"),)


def test_the_sides_of_a_wrapped_block_are_found_inside() -> None:
    row = found(Chain([Wrapper() for _ in range(2)])).row
    assert row.feed_forward == (("block.norm2", "block.ff"),)
    assert (row.attention, row.attention_norms) == (("block.attn",), ("block.norm1",))


def test_a_block_that_is_attention_alone_is_no_wrapper() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    assert found(Chain([Residual() for _ in range(2)])).row.attention == ("attn",)


@pytest.mark.parametrize("backend", ["torch", "torch-ffn", "auto"])
def test_a_sequential_of_blocks_is_a_stack_itself(backend: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(PreNorm() for _ in range(3))), torch.randn(ROWS, WIDTH)
    plain = step(model, lambda: model(x))
    budget = {"vram_budget": 2**30} if backend == "auto" else {}
    with lowtide.attach(model, backend=backend, **budget) as handle:
        assert_equal(step(model, lambda: model(x)), plain)
        assert handle.receipt().totals["recompute_calls"] == (0 if backend == "auto" else 3)
    assert type(model) is nn.Sequential
