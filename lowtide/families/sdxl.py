"""SDXL: a U-Net, see unet.py."""

from lowtide.families import unet
from lowtide.families.inputs import rand, randint, randn
from lowtide.families.row import Build, Family

INPUTS = {
    "sample": randn("B", "C", "h", "w"),
    "timestep": randint("B", high=1000),
    "encoder_hidden_states": randn("B", "T", "E"),
    "added_cond_kwargs": {"text_embeds": randn("B", "P"), "time_ids": rand("B", 6, scale=1000.0)},
}
_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
_UP = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
TINY_CONFIG = {
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
}
REAL_CONFIG = {
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
}
SIZES = {
    "C": "in_channels",
    "E": "cross_attention_dim",
    "P": "projection_class_embeddings_input_dim - 6 * addition_time_embed_dim",
}

ROWS = (
    Family(
        key="sdxl",
        title="SDXL",
        aliases=("Stable Diffusion XL", "SDXL base"),
        class_path=unet.CLASS,
        stacks=unet.STACKS,
        tiny=Build(
            config=TINY_CONFIG,
            vars={"B": 2, "H": 128, "W": 128, "C": 4, "T": 6, "E": 16, "P": 16},
            let=unet.LET,
            inputs=INPUTS,
        ),
        real=Build(
            config=REAL_CONFIG,
            vars={"B": 1, "H": 1024, "W": 1024, "C": 4, "T": 77, "E": 2048, "P": 1280},
            let=unet.LET,
            inputs=INPUTS,
        ),
        parameters=2_567_463_684,
        published="2.57B (U-Net; 3.5B with the text encoders)",
        sizes=SIZES,
        block_classes=unet.BLOCK_CLASSES,
    ),
)
