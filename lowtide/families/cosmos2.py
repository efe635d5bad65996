"""Cosmos 2 Image (Cosmos Predict 2, text to image, 2B). A video model: an image is one frame.

Its padding mask needs torchvision, so the tiny configuration leaves it out.
"""

from lowtide.families.inputs import rand, randn, several, when, zeros
from lowtide.families.row import Build, Family, Stack

CLASS = "diffusers.CosmosTransformer3DModel"
STACKS = (
    Stack(
        name="transformer_blocks",
        blocks=("transformer_blocks.*",),
        feed_forward=(("norm3", "ff"),),
        attention=("attn1", "attn2"),
        attention_norms=("norm1", "norm2"),
    ),
)
BLOCK_CLASSES = ("CosmosTransformerBlock",)
LET = {"h": "H//8", "w": "W//8"}
INPUTS = {
    "hidden_states": randn("B", "C", 1, "h", "w"),
    "timestep": rand("B"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "padding_mask": when("M", zeros(1, 1, "H", "W", dtype="compute")),
}
VARIANTS = {
    "residuals given to blocks": {"block_controlnet_hidden_states": several(4, randn("B", "(h//2)*(w//2)", 24))}
}
SIZES = {"C": "in_channels", "E": "text_embed_dim", "M": "concat_padding_mask"}
_SHARED = {"patch_size": (1, 2, 2), "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
TINY_CONFIG = _SHARED | {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 8,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "concat_padding_mask": False,
    "controlnet_block_every_n": 2,
}
REAL_CONFIG = _SHARED | {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 28,
    "mlp_ratio": 4.0,
    "text_embed_dim": 1024,
    "adaln_lora_dim": 256,
    "max_size": (128, 240, 240),
    "concat_padding_mask": True,
}
TINY = Build(
    config=TINY_CONFIG,
    vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16, "M": 0},
    let=LET,
    inputs=INPUTS,
)
PARAMETERS = 1_956_405_248

ROWS = (
    Family(
        key="cosmos2_image",
        title="Cosmos 2 Image",
        aliases=("cosmos", "cosmos2", "Cosmos Predict 2 Text2Image 2B"),
        class_path=CLASS,
        stacks=STACKS,
        tiny=TINY,
        real=Build(
            config=REAL_CONFIG,
            vars={"B": 1, "H": 512, "W": 512, "C": 16, "T": 512, "E": 1024, "M": 1},
            let=LET,
            inputs=INPUTS,
        ),
        parameters=PARAMETERS,
        published="2B (rounded)",
        variants=VARIANTS,
        sizes=SIZES,
        block_classes=BLOCK_CLASSES,
    ),
)
