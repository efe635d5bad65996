"""SanaVideo 2B. Its self-attention (attn1) is linear attention: only attn2 is softmax attention. No norm feeds it."""

from lowtide.families.inputs import mask, ones, rand, randn, several
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "F", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B", scale=1000.0),
    "encoder_attention_mask": ones("B", "T"),
}

ROWS = (
    Family(
        key="sana_video",
        title="SanaVideo",
        aliases=("Sana Video 2B", "Sana Video 2B 480p"),
        class_path="diffusers.SanaVideoTransformer3DModel",
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
                "attention_head_dim": 12,
                "num_layers": 8,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 12,
                "cross_attention_dim": 24,
                "caption_channels": 16,
                "mlp_ratio": 2.5,
                "sample_size": 8,
                "rope_max_seq_len": 32,
            },
            vars={"B": 2, "FR": 9, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={"mlp_ratio": 3.0},
            vars={"B": 1, "FR": 49, "H": 480, "W": 832, "C": 16, "T": 300, "E": 2304},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=2_056_862_144,
        published="2B",
        variants={"ControlNet residuals": {"controlnet_block_samples": several(3, randn("B", "F*(h//2)*(w//2)", 24))}},
        sizes={"C": "in_channels", "E": "caption_channels"},
        block_classes=("SanaVideoTransformerBlock",),
    ),
)
