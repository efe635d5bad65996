"""CogVideoX 2B. The 5B models are handed rotary embeddings; the 2B model is not."""

from lowtide.families.inputs import fixed, randint, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "F", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": randint("B", high=1000),
}
_ANGLES = randn("F*(h//2)*(w//2)", 8)

ROWS = (
    Family(
        key="cogvideox",
        title="CogVideoX",
        aliases=("CogVideoX 2B",),
        class_path="diffusers.CogVideoXTransformer3DModel",
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
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 4,
                "text_embed_dim": 8,
                "num_layers": 8,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 8,
                "max_text_seq_length": 6,
            },
            vars={"B": 2, "FR": 5, "H": 64, "W": 64, "C": 4, "T": 6, "E": 8},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "FR": 49, "H": 480, "W": 720, "C": 16, "T": 226, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=1_693_783_872,
        published="2B (1.7B)",
        variants={"rotary embeddings": {"image_rotary_emb": fixed(_ANGLES, _ANGLES)}},
        sizes={"C": "in_channels", "T": "max_text_seq_length", "E": "text_embed_dim"},
        block_classes=("CogVideoXBlock",),
    ),
)
