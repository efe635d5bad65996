"""LTXVideo 0.9.5 (2B)."""

from lowtide.families.inputs import fixed, mask, ones, rand, randn, size
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//8+1", "h": "H//32", "w": "W//32", "S": "F*h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B", scale=1000.0),
    "num_frames": size("F"),
    "height": size("h"),
    "width": size("w"),
    "rope_interpolation_scale": fixed(0.32, 32.0, 32.0),
    "encoder_attention_mask": ones("B", "T"),
}

ROWS = (
    Family(
        key="ltx_video_095",
        title="LTXVideo 0.9.5",
        aliases=("ltxvideo", "ltx"),
        class_path="diffusers.LTXVideoTransformer3DModel",
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
                "in_channels": 8,
                "out_channels": 8,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "cross_attention_dim": 16,
                "num_layers": 8,
                "caption_channels": 16,
            },
            vars={"B": 2, "FR": 9, "H": 96, "W": 96, "C": 8, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={},
            vars={"B": 1, "FR": 49, "H": 512, "W": 768, "C": 128, "T": 256, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=1_923_385_472,
        published="2B",
        variants={"time step per token": {"timestep": rand("B", "S", scale=1000.0)}},
        sizes={"C": "in_channels", "E": "caption_channels"},
        block_classes=("LTXVideoTransformerBlock",),
    ),
)
