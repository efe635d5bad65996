"""Stable Diffusion 1.x: a U-Net, see unet.py. Every attention unit has one transformer block."""

from lowtide.families import unet
from lowtide.families.inputs import randint, randn
from lowtide.families.row import Build, Family

_INPUTS = {
    "sample": randn("B", "C", "h", "w"),
    "timestep": randint("B", high=1000),
    "encoder_hidden_states": randn("B", "T", "E"),
}

ROWS = (
    Family(
        key="sd15",
        title="SD 1.x",
        aliases=("SD 1.5", "sd1", "Stable Diffusion 1.5", "Stable Diffusion 1.x", "Stable Diffusion v1.5"),
        class_path=unet.CLASS,
        stacks=unet.STACKS,
        tiny=Build(
            config={
                "sample_size": 16,
                "block_out_channels": (8, 8, 16, 16),
                "layers_per_block": 2,
                "cross_attention_dim": 16,
                "attention_head_dim": 2,
                "norm_num_groups": 4,
            },
            vars={"B": 2, "H": 128, "W": 128, "C": 4, "T": 6, "E": 16},
            let=unet.LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
            vars={"B": 1, "H": 512, "W": 512, "C": 4, "T": 77, "E": 768},
            let=unet.LET,
            inputs=_INPUTS,
        ),
        parameters=859_520_964,
        published="860M (U-Net)",
        sizes={"C": "in_channels", "E": "cross_attention_dim"},
        block_classes=unet.BLOCK_CLASSES,
    ),
)
