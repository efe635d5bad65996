"""Stacks found by structure, and what one forward says of them: against the rows of every family, and without one."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.watch import CONFIRMED, DECLARED, DOUBTFUL, STRUCTURE, Watched, inputs_of, watch, without_forward
from lowtide.runtime.resolve import ResolvedStack, resolve

ROWS = families.all_families()
IN_PARTS = {"sdxl", "kolors", "sd15", "stable_cascade_c"}
"""Micro-blocks of several lists in turn: structure shows each list as a stack of its own."""
LINEAR_ATTENTION = {"sana", "sana_video"}


@pytest.fixture(params=ROWS, ids=lambda row: row.key)
def row(request: pytest.FixtureRequest) -> Family:
    return request.param


def names(stacks: list[ResolvedStack]) -> dict[tuple[str, ...], ResolvedStack]:
    return {tuple(name for name, _ in stack.blocks): stack for stack in stacks}


def test_structure_alone_finds_the_stacks_of_42_of_46_models() -> None:
    right = set()
    for row in ROWS:
        model = build_model(row, device="meta")
        if set(names(resolve(model, None))) == set(names(resolve(model, row.stacks))):
            right.add(row.key)
    assert right == {row.key for row in ROWS} - IN_PARTS
    assert (len(right), len(ROWS)) == (42, 46)


def test_a_forward_confirms_every_stack_and_finds_the_attention_of_the_row(row: Family) -> None:
    model = build_model(row, device="meta")
    stacks, declared = resolve(model, None), names(resolve(model, row.stacks))
    seen = watch(model, stacks, build_inputs(row.tiny, device="meta"))
    assert {evidence.stack.certainty for evidence in seen.stacks.values()} == {CONFIRMED}
    assert seen.missed == ()
    for stack in stacks:
        sides = seen.stacks[stack.name].sides
        doubtful = {path for path, side in sides.items() if side.certainty == DOUBTFUL}
        assert doubtful == ({"attn1"} if row.key in LINEAR_ATTENTION else set())
        known = declared.get(tuple(name for name, _ in stack.blocks))
        if known is not None:
            confirmed = {path for path in stack.row.attention if path in sides} - doubtful
            assert confirmed == {path for path, _ in known.attention_sides(known.blocks[0][1])} & set(
                known.row.attention
            )
            assert bool(stack.row.feed_forward) or row.key in ("flux2",) or not known.has_feed_forward


def test_a_row_needs_no_forward() -> None:
    row = families.find("flux1")
    (stack, *_) = resolve(build_model(row, device="meta"), row.stacks)
    evidence = without_forward(stack)
    assert evidence.stack.certainty == DECLARED
    assert {side.certainty for side in evidence.sides.values()} == {DECLARED}


# ---------------------------------------------------------------------- classes of diffusers that no row describes


def _dit() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor([5]),
        "class_labels": torch.tensor([1]),
    }


def _prior() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=4, num_layers=3, embedding_dim=8, num_embeddings=7
    )
    x = torch.randn(1, 8)
    return model, {
        "hidden_states": x,
        "timestep": 2,
        "proj_embedding": x,
        "encoder_hidden_states": torch.randn(1, 7, 8),
    }


def _skyreels() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=3, rope_max_seq_len=32,
    )  # fmt: skip
    x, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 4, 16)
    return model, {"hidden_states": x, "timestep": torch.tensor([5]), "encoder_hidden_states": text}


def _controlnet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxControlNetModel(
        in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    row = families.find("flux1")
    inputs = build_inputs(row.tiny)
    x = torch.randn(1, 16, 16)
    return model, {
        "hidden_states": x, "controlnet_cond": x, "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(4, 3), "encoder_hidden_states": torch.randn(1, 4, 32),
        "pooled_projections": inputs["pooled_projections"][:1],
    }  # fmt: skip


NO_ROW: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], dict[str, tuple[int, tuple[str, ...]]]]] = {
    "DiT": (_dit, {"transformer_blocks": (3, ("ff", "attn1"))}),
    "Prior": (_prior, {"transformer_blocks": (3, ("norm3", "ff", "attn1"))}),
    "SkyReels": (_skyreels, {"blocks": (3, ("ffn", "attn1", "attn2"))}),
    "Flux ControlNet": (
        _controlnet,
        {
            "transformer_blocks": (2, ("ff", "ff_context", "attn")),
            "single_transformer_blocks": (3, ("proj_mlp", "act_mlp", "attn")),
        },
    ),
}


@pytest.mark.parametrize(("make", "expected"), NO_ROW.values(), ids=NO_ROW)
def test_classes_that_no_row_describes(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], expected: dict[str, tuple[int, tuple[str, ...]]]
) -> None:
    model, inputs = make()
    stacks = resolve(model, None)
    seen = watch(model, stacks, inputs)
    assert {stack.name: (len(stack.blocks), tuple(seen.stacks[stack.name].sides)) for stack in stacks} == expected
    for evidence in seen.stacks.values():
        assert evidence.stack.certainty == CONFIRMED
        assert evidence.stack.why[-1] == "each was handed what the one before returned"
        assert {side.certainty for side in evidence.sides.values()} == {CONFIRMED}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------- doubts


class Block(nn.Module):
    """attn: softmax attention by hand; ff: in the block, and called unless ``idle``."""

    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        self.ff = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.idle = idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x if self.idle else x + self.ff(x)


class Calls(nn.Module):
    """Blocks, and how a forward calls them."""

    def __init__(self, how: Callable[[list[nn.Module], torch.Tensor], torch.Tensor], idle: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(idle) for _ in range(3))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(list(self.blocks), x)


def seen_of(model: nn.Module) -> Watched:
    return watch(model, resolve(model, None), {"x": torch.randn(2, 8)})


HOWS = {
    "not called": (lambda b, x: b[1](b[0](x)), "1 of 3 blocks were not called (blocks.2 the first)"),
    "order": (lambda b, x: b[1](b[2](b[0](x))), "its blocks were called in another order: 0, 2, 1"),
    "beside": (
        lambda b, x: b[0](x) + b[1](x) + b[2](x),
        "its blocks were given the same tensors: they run beside one another, not one after another",
    ),
}


@pytest.mark.parametrize(("how", "doubt"), HOWS.values(), ids=HOWS)
def test_what_a_forward_contradicts_is_doubtful(how: Any, doubt: str) -> None:
    evidence = seen_of(Calls(how)).stacks["blocks"]
    assert (evidence.stack.certainty, evidence.stack.why) == (DOUBTFUL, (doubt,))


def test_glue_between_blocks_and_repeated_calls_are_told() -> None:
    def twice(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        for block in (*blocks, *blocks):
            x = block(x * 2)
        return x

    why = seen_of(Calls(twice)).stacks["blocks"].stack.why
    assert why == (
        "its 3 blocks were called 2 times each, in this order",
        "2 of 2 were handed what the model made in between: segments end there",
    )


def test_sides_that_are_not_what_their_names_say() -> None:
    sides = seen_of(Calls(lambda b, x: b[2](b[1](b[0](x))), idle=True)).stacks["blocks"].sides
    assert sides["attn"].why == ("no attention kernel was called in it: linear attention, perhaps",)
    assert sides["ff"].why == ("it was not called",)
    assert {side.certainty for side in sides.values()} == {DOUBTFUL}


def test_a_kernel_inside_makes_attention_sure() -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x)[None, None].chunk(3, -1)
            return self.out(F.scaled_dot_product_attention(q, k, v)[0, 0])

    model = Calls(lambda b, x: b[2](b[1](b[0](x))))
    for block in model.blocks[:2]:
        block.attn = Kernel()
    attention = seen_of(model).stacks["blocks"].sides["attn"]
    assert attention.why == ("no attention kernel was called in it of 1 of 3 blocks: linear attention, perhaps",)


def test_blocks_that_structure_does_not_show_are_named() -> None:
    class Model(Calls):
        def __init__(self) -> None:
            super().__init__(lambda b, x: b[2](b[1](b[0](x))))
            self.early, self.late = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.late(self.early(x)))

    (missed,) = seen_of(Model()).missed
    assert (missed.block_class, missed.names) == ("Block", ("early", "late"))


def test_inputs_from_shapes() -> None:
    model = nn.Linear(2, 2).bfloat16()
    inputs = inputs_of({"x": [3, 2], "flag": True, "sizes": {"tuple": [1, 2]}, "none": None}, model)
    assert (inputs["x"].shape, inputs["x"].dtype) == ((3, 2), torch.bfloat16)
    assert (inputs["flag"], inputs["sizes"], inputs["none"]) == (True, (1, 2), None)


def test_a_forward_that_fails_leaves_no_hooks() -> None:
    model = Calls(lambda b, x: b[0](x))
    with pytest.raises(ConfigError, match=r"the forward of Calls failed with these inputs \(x\)"):
        watch(model, resolve(model, None), {"x": torch.randn(2, 7)})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert without_forward(resolve(model, None)[0]).stack.certainty == STRUCTURE
