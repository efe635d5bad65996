"""CogView4. One feed-forward module serves both streams: every block calls it twice."""

from lowtide.families.inputs import full, randint, randn, zeros
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": randint("B", high=1000),
    "original_size": full(1024.0, "B", 2),
    "target_size": full(1024.0, "B", 2),
    "crop_coords": zeros("B", 2, dtype="compute"),
}

ROWS = (
    Family(
        key="cogview4",
        title="CogView4",
        aliases=("cogview", "CogView4-6B"),
        class_path="diffusers.CogView4Transformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",),),
                attention=("attn1",),
                attention_norms=("norm1",),
            ),
        ),
        tiny=Build(
            config={
                "patch_size": 2,
                "in_channels": 4,
                "num_layers": 8,
                "attention_head_dim": 4,
                "num_attention_heads": 4,
                "out_channels": 4,
                "text_embed_dim": 8,
                "time_embed_dim": 8,
                "condition_dim": 4,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 8},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            # The class defaults (30 blocks of width 2560) are not the checkpoint.
            config={"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 16, "T": 224, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=6_369_118_272,
        published="6B (rounded)",
        sizes={"C": "in_channels", "E": "text_embed_dim"},
        block_classes=("CogView4TransformerBlock",),
    ),
)
