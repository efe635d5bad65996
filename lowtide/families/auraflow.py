"""AuraFlow v0.3. A few joint blocks, then many single ones; their streams are concatenated once, in between."""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
}

ROWS = (
    Family(
        key="auraflow",
        title="AuraFlow",
        aliases=("aura_flow", "AuraFlow v0.3"),
        class_path="diffusers.AuraFlowTransformer2DModel",
        stacks=(
            Stack(
                name="joint_transformer_blocks",
                blocks=("joint_transformer_blocks.*",),
                feed_forward=(("ff",), ("ff_context",)),
                attention=("attn",),
                attention_norms=("norm1", "norm1_context"),
            ),
            Stack(
                name="single_transformer_blocks",
                blocks=("single_transformer_blocks.*",),
                feed_forward=(("ff",),),
                attention=("attn",),
                attention_norms=("norm1",),
            ),
        ),
        tiny=Build(
            config={
                "sample_size": 16,
                "patch_size": 2,
                "in_channels": 4,
                "num_mmdit_layers": 4,
                "num_single_dit_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "caption_projection_dim": 16,
                "out_channels": 4,
                "pos_embed_max_size": 64,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={"pos_embed_max_size": 9216},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 4, "T": 256, "E": 2048},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=6_858_605_568,
        published="6.8B",
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"),
    ),
)
