"""Stable Diffusion 3 medium. Its last block has no text feed-forward and returns (None, hidden states)."""

from lowtide.families.inputs import rand, randn, several
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "pooled_projections": randn("B", "P"),
    "timestep": rand("B", scale=1000.0),
}

ROWS = (
    Family(
        key="sd3_medium",
        title="SD3 medium",
        aliases=("sd3", "Stable Diffusion 3", "Stable Diffusion 3 medium"),
        class_path="diffusers.SD3Transformer2DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",), ("ff_context",)),
                attention=("attn", "attn2"),
                attention_norms=("norm1", "norm1_context"),
            ),
        ),
        tiny=Build(
            config={
                "sample_size": 16,
                "patch_size": 2,
                "in_channels": 4,
                "num_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "caption_projection_dim": 16,
                "pooled_projection_dim": 16,
                "out_channels": 4,
                "pos_embed_max_size": 16,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16, "P": 16},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={
                "num_layers": 24,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 192,
            },
            vars={"B": 3, "H": 1024, "W": 1024, "C": 16, "T": 333, "E": 4096, "P": 2048},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=2_028_328_000,
        published="2B",
        variants={
            "ControlNet residuals": {"block_controlnet_hidden_states": several(4, randn("B", 16, 16))},
            "skip_layers=[3]": {"skip_layers": [3]},
        },
        sizes={"C": "in_channels", "E": "joint_attention_dim", "P": "pooled_projection_dim"},
        block_classes=("JointTransformerBlock",),
    ),
)
