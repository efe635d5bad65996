"""Sana 1.6B. Its self-attention (attn1) is linear attention: only attn2 is softmax attention."""

from lowtide.families.inputs import mask, ones, rand, randn, several
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//32", "w": "W//32"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B", scale=1000.0),
    "encoder_attention_mask": ones("B", "T"),
}

ROWS = (
    Family(
        key="sana",
        title="Sana",
        class_path="diffusers.SanaTransformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",),),
                attention=("attn2",),
            ),
        ),
        tiny=Build(
            config={
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 4,
                "num_layers": 8,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 4,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "mlp_ratio": 2.5,
                "sample_size": 8,
            },
            vars={"B": 2, "H": 256, "W": 256, "C": 4, "T": 6, "E": 8},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={},
            vars={"B": 4, "H": 1024, "W": 1024, "C": 32, "T": 300, "E": 2304},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=1_604_462_752,
        published="1.6B",
        variants={"ControlNet residuals": {"controlnet_block_samples": several(3, randn("B", "h*w", 8))}},
        sizes={"C": "in_channels", "E": "caption_channels"},
        block_classes=("SanaTransformerBlock",),
    ),
)
