"""Flux.2 (dev). Its single blocks compute the feed-forward inside the attention module, from one fused projection."""

from lowtide.families.inputs import full, grid, rand, randn, when
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w", 1),
    "txt_ids": grid(1, 1, 1, "T"),
    "guidance": when("G", full(4.0, "B")),
}

ROWS = (
    Family(
        key="flux2",
        title="Flux.2",
        aliases=("FLUX.2-dev",),
        class_path="diffusers.Flux2Transformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",), ("ff_context",)),
                attention=("attn",),
                attention_norms=("norm1", "norm1_context"),
            ),
            Stack(
                name="single_transformer_blocks",
                blocks=("single_transformer_blocks.*",),
                feed_forward=(("attn.mlp_act_fn", "attn.to_out"),),
                attention=("attn",),
                attention_norms=("norm",),
            ),
        ),
        tiny=Build(
            config={
                "patch_size": 1,
                "in_channels": 4,
                "num_layers": 6,
                "num_single_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "timestep_guidance_channels": 32,
                "axes_dims_rope": (4, 4, 4, 4),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32, "G": 1},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 128, "T": 512, "E": 15360, "G": 1},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=32_223_281_152,
        published="32B",
        sizes={"C": "in_channels", "E": "joint_attention_dim", "G": "guidance_embeds"},
        block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    ),
)
