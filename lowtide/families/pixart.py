"""PixArt Sigma."""

from lowtide.families.inputs import mask, ones, rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B", scale=1000.0),
    "encoder_attention_mask": ones("B", "T"),
    "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
}

ROWS = (
    Family(
        key="pixart_sigma",
        title="PixArt Sigma",
        aliases=("pixart",),
        class_path="diffusers.PixArtTransformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",),),
                attention=("attn1", "attn2"),
                attention_norms=("norm1",),
            ),
        ),
        tiny=Build(
            config={
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 8,
                "cross_attention_dim": 16,
                "sample_size": 16,
                "patch_size": 2,
                "caption_channels": 16,
                "interpolation_scale": 1,
                "use_additional_conditions": False,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={
                "sample_size": 128,
                "caption_channels": 4096,
                "interpolation_scale": 2,
                "use_additional_conditions": False,
            },
            vars={"B": 3, "H": 1024, "W": 1024, "C": 4, "T": 300, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=610_856_096,
        published="0.6B",
        sizes={"C": "in_channels", "E": "caption_channels"},
        block_classes=("BasicTransformerBlock",),
    ),
)
