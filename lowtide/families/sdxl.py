"""SDXL: a U-Net. Its blocks are the micro-blocks (ResNet and transformer), one stack in call order.

Between micro-blocks the model concatenates skip tensors, reshapes and samples up or down.
"""

from lowtide.families.inputs import rand, randint, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "sample": randn("B", "C", "h", "w"),
    "timestep": randint("B", high=1000),
    "encoder_hidden_states": randn("B", "T", "E"),
    "added_cond_kwargs": {"text_embeds": randn("B", "P"), "time_ids": rand("B", 6, scale=1000.0)},
}
_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
_UP = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")

ROWS = (
    Family(
        key="sdxl",
        title="SDXL",
        aliases=("Stable Diffusion XL", "SDXL base"),
        class_path="diffusers.UNet2DConditionModel",
        stacks=(
            Stack(
                name="micro_blocks",
                blocks=(
                    "down_blocks.*.{resnets.#|attentions.#.transformer_blocks.*}",
                    "mid_block.{resnets.#|attentions.#.transformer_blocks.*}",
                    "up_blocks.*.{resnets.#|attentions.#.transformer_blocks.*}",
                ),
                feed_forward=(("norm3", "ff"),),
                attention=("attn1", "attn2"),
                attention_norms=("norm1", "norm2"),
            ),
        ),
        tiny=Build(
            config={
                "sample_size": 16,
                "block_out_channels": (8, 8, 16),
                "layers_per_block": 2,
                "cross_attention_dim": 16,
                "attention_head_dim": (2, 2, 4),
                "norm_num_groups": 4,
                "down_block_types": _DOWN,
                "up_block_types": _UP,
                "transformer_layers_per_block": (1, 2, 6),
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 64,
            },
            vars={"B": 2, "H": 128, "W": 128, "C": 4, "T": 6, "E": 16, "P": 16},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={
                "sample_size": 128,
                "block_out_channels": (320, 640, 1280),
                "cross_attention_dim": 2048,
                "attention_head_dim": (5, 10, 20),
                "down_block_types": _DOWN,
                "up_block_types": _UP,
                "transformer_layers_per_block": (1, 2, 10),
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
            vars={"B": 1, "H": 1024, "W": 1024, "C": 4, "T": 77, "E": 2048, "P": 1280},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=2_567_463_684,
        published="2.57B (U-Net; 3.5B with the text encoders)",
        sizes={
            "C": "in_channels",
            "E": "cross_attention_dim",
            "P": "projection_class_embeddings_input_dim - 6 * addition_time_embed_dim",
        },
        block_classes=("ResnetBlock2D", "BasicTransformerBlock"),
    ),
)
