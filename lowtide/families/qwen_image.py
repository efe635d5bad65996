"""Qwen Image 1.0."""

from lowtide.families.inputs import fixed, mask, ones, rand, randn, several, size
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "encoder_hidden_states_mask": ones("B", "T"),
    "timestep": rand("B"),
    "img_shapes": several("B", [fixed(1, size("h"), size("w"))]),
}

ROWS = (
    Family(
        key="qwen_image",
        title="Qwen Image 1.0",
        class_path="diffusers.QwenImageTransformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("img_mlp",), ("txt_mlp",)),
                attention=("attn",),
                attention_norms=("img_norm1", "txt_norm1"),
            ),
        ),
        tiny=Build(
            config={
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "axes_dims_rope": (8, 4, 4),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 16, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_hidden_states_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 512, "E": 3584},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=20_430_401_088,
        published="20B",
        variants={"ControlNet residuals": {"controlnet_block_samples": several(4, randn("B", "S", 32))}},
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("QwenImageTransformerBlock",),
    ),
)
