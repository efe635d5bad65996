"""Ideogram 4: one sequence of text and image; latents and text features are both as long as all of it."""

from lowtide.families.inputs import full, grid, joined, ones, rand, randn
from lowtide.families.row import Build, Family, Stack

_IMAGE_STARTS_AT = 65536
_TEXT, _IMAGE = 3, 2

_LET = {"h": "H//16", "w": "W//16", "S": "h*w", "N": "T+S"}
_INPUTS = {
    "hidden_states": randn("B", "N", "C"),
    "timestep": rand("B"),
    "encoder_hidden_states": randn("B", "N", "E"),
    "position_ids": joined(
        grid("T", 1, 1, dtype="int64", batch="B"),
        grid(1, "h", "w", dtype="int64", offset=(_IMAGE_STARTS_AT,) * 3, batch="B"),
        dim=1,
    ),
    "segment_ids": ones("B", "N"),
    "indicator": joined(full(_TEXT, "B", "T", dtype="int64"), full(_IMAGE, "B", "S", dtype="int64"), dim=1),
}

ROWS = (
    Family(
        key="ideogram4",
        title="Ideogram 4",
        aliases=("ideogram", "Ideogram 4.0"),
        class_path="diffusers.Ideogram4Transformer2DModel",
        stacks=(
            Stack(
                name="layers",
                blocks=("layers.*",),
                feed_forward=(("feed_forward", "ffn_norm2"),),
                attention=("attention",),
                attention_norms=("attention_norm1",),
            ),
        ),
        tiny=Build(
            config={
                "in_channels": 8,
                "num_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "adaln_dim": 16,
                "llm_features_dim": 24,
                "rope_theta": 10000,
                "mrope_section": (2, 1, 1),
            },
            vars={"B": 2, "H": 48, "W": 48, "C": 8, "T": 5, "E": 24},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 128, "T": 512, "E": 53248},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=9_279_288_448,
        published="9.3B",
        sizes={"C": "in_channels", "E": "llm_features_dim"},
        block_classes=("Ideogram4TransformerBlock",),
    ),
)
