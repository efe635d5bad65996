"""HiDream I1. Its feed-forwards are mixtures of experts, which have gradients in train() only.

Around every block of both stacks the model concatenates that layer's own Llama tokens and slices them off again.
"""

from lowtide.families.inputs import randint, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timesteps": randint("B", high=1000),
    "encoder_hidden_states_t5": randn("B", "T", "E"),
    "encoder_hidden_states_llama3": randn("L", "B", "T", "E2"),
    "pooled_embeds": randn("B", "P"),
}

ROWS = (
    Family(
        key="hidream",
        title="HiDream",
        aliases=("HiDream-I1", "HiDream I1 Full", "hidream_full"),
        class_path="diffusers.HiDreamImageTransformer2DModel",
        stacks=(
            Stack(
                name="double_stream_blocks",
                blocks=("double_stream_blocks.*",),
                feed_forward=(("block.ff_i",), ("block.ff_t",)),
                attention=("block.attn1",),
                attention_norms=("block.norm1_i", "block.norm1_t"),
            ),
            Stack(
                name="single_stream_blocks",
                blocks=("single_stream_blocks.*",),
                feed_forward=(("block.ff_i",),),
                attention=("block.attn1",),
                attention_norms=("block.norm1_i",),
            ),
        ),
        tiny=Build(
            config={
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 6,
                "num_single_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "caption_channels": [8, 4],
                "text_emb_dim": 8,
                "num_routed_experts": 3,
                "num_activated_experts": 2,
                "axes_dims_rope": (4, 2, 2),
                "max_resolution": (16, 16),
                "llama_layers": [0, 1] + [2] * 12,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 5, "E": 8, "E2": 4, "L": 3, "P": 8},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": 16,
                "num_single_layers": 32,
                "caption_channels": [4096, 4096],
                "llama_layers": [*range(32)] + [31] * 16,
                "axes_dims_rope": (64, 32, 32),
                "max_resolution": (128, 128),
            },
            vars={"B": 1, "H": 512, "W": 512, "C": 16, "T": 128, "E": 4096, "E2": 4096, "L": 32, "P": 2048},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=17_105_733_184,
        published="17B",
        variants={"latents that are not square": {"hidden_states": randn("B", "C", "h", "w-2")}},
        sizes={"C": "in_channels", "P": "text_emb_dim"},
        block_classes=("HiDreamBlock",),
    ),
)
