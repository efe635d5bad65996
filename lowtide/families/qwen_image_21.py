"""Qwen Image 2.1: one stream; text attends causally, target image to everything: one attention call a segment."""

from lowtide.families.inputs import fixed, joined, ones, rand, randn, several, size, zeros
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_shapes": several("B", [fixed(1, size("h"), size("w"))]),
    "img_mask": joined(zeros("B", "T", dtype="bool"), ones("B", "S//4", dtype="bool"), dim=1),
}

ROWS = (
    Family(
        key="qwen_image_21",
        title="Qwen Image 2.1",
        aliases=("Qwen-Image-2.1", "qwen_image_v2.1"),
        class_path="diffusers.QwenImage21Transformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("img_mlp",),),
                attention=("attn",),
                attention_norms=("img_norm1",),
            ),
        ),
        tiny=Build(
            config={
                "patch_size": 1,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "context_in_dim": 16,
                "mlp_ratio": 2,
                "axes_dims_rope": (4, 6, 6),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 5, "E": 16},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 512, "W": 512, "C": 64, "T": 10, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=7_115_124_736,
        published="7B (rounded; counted: no public figure)",
        sizes={"C": "in_channels", "E": "context_in_dim"},
        block_classes=("QwenImage21TransformerBlock",),
    ),
)
