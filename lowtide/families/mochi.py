"""Mochi 1 preview. Its last block has no text feed-forward and returns its text argument as it is."""

from lowtide.families.inputs import mask, ones, randint, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//6+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "F", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": randint("B", high=1000),
    "encoder_attention_mask": ones("B", "T", dtype="bool"),
}

ROWS = (
    Family(
        key="mochi",
        title="Mochi",
        aliases=("Mochi 1", "Mochi 1 preview"),
        class_path="diffusers.MochiTransformer3DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("norm3", "ff", "norm4"), ("norm3_context", "ff_context", "norm4_context")),
                attention=("attn1",),
                attention_norms=("norm1", "norm1_context"),
            ),
        ),
        tiny=Build(
            config={
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 8,
                "pooled_projection_dim": 16,
                "in_channels": 4,
                "text_embed_dim": 16,
                "time_embed_dim": 4,
                "max_sequence_length": 8,
            },
            vars={"B": 2, "FR": 7, "H": 64, "W": 64, "C": 4, "T": 8, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-3"), dtype="bool")},
        ),
        real=Build(
            config={},
            vars={"B": 1, "FR": 31, "H": 480, "W": 848, "C": 12, "T": 256, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=10_027_677_744,
        published="10B",
        sizes={"C": "in_channels", "T": "max_sequence_length", "E": "text_embed_dim"},
        block_classes=("MochiTransformerBlock",),
    ),
)
