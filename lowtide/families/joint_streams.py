"""What models of Flux's kind share: blocks of double and of single streams (an inline MLP), inputs, a tiny size."""

from lowtide.families.inputs import grid, rand, randn, several, zeros
from lowtide.families.row import Stack

DOUBLE = Stack(
    name="transformer_blocks",
    blocks=("transformer_blocks.*",),
    feed_forward=(("ff",), ("ff_context",)),
    attention=("attn",),
    attention_norms=("norm1", "norm1_context"),
)
SINGLE = Stack(
    name="single_transformer_blocks",
    blocks=("single_transformer_blocks.*",),
    feed_forward=(("proj_mlp", "act_mlp", "proj_out"),),
    attention=("attn",),
    attention_norms=("norm",),
)

LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w"),
    "txt_ids": zeros("T", 3),
}
SIZES = {"C": "in_channels", "E": "joint_attention_dim"}

TINY = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 6,
    "num_single_layers": 8,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
TINY_VARS = {"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32}
TINY_RESIDUALS = {
    "controlnet_block_samples": several(3, randn("B", "S", 32)),
    "controlnet_single_block_samples": several(4, randn("B", "S", 32)),
}
"""What a ControlNet adds to the blocks of the tiny size."""
