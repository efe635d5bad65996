"""Stable Cascade stage C: residual, time step and attention micro-blocks in turn, one stack in call order.

Residual and attention blocks have dropout inside. The first residual block of the second way up gets the skip tensor.
"""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "(100*H+4266)//4267", "w": "(100*W+4266)//4267"}  # the autoencoder divides by 42.67 and rounds up
_INPUTS = {
    "sample": randn("B", "C", "h", "w"),
    "timestep_ratio": rand("B"),
    "clip_text_pooled": randn("B", 1, "P"),
    "clip_text": randn("B", "T", "E"),
    "clip_img": randn("B", 1, "Q"),
}
_MICRO_BLOCKS = ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]
_CONFIG = {
    "patch_size": 1,
    "down_blocks_repeat_mappers": [1, 1],
    "up_blocks_repeat_mappers": [1, 1],
    "block_types_per_layer": [_MICRO_BLOCKS, _MICRO_BLOCKS],
    "kernel_size": 3,
    "dropout": [0.1, 0.1],
    "self_attn": True,
    "timestep_conditioning_type": ["sca", "crp"],
    "switch_level": [False],
}

ROWS = (
    Family(
        key="stable_cascade_c",
        title="Stable Cascade stage C",
        aliases=("stable_cascade", "cascade"),
        class_path="diffusers.StableCascadeUNet",
        stacks=(
            Stack(
                name="micro_blocks",
                blocks=("down_blocks.*.*", "up_blocks.*.*"),
                feed_forward=(("channelwise",),),
                attention=("attention",),
                attention_norms=("norm",),
                carry=("x",),  # at small sizes the text beside it is larger
            ),
        ),
        tiny=Build(
            config=_CONFIG
            | {
                "in_channels": 4,
                "out_channels": 4,
                "timestep_ratio_embedding_dim": 8,
                "conditioning_dim": 16,
                "block_out_channels": [16, 16],
                "num_attention_heads": [2, 2],
                "down_num_layers_per_block": [2, 3],
                "up_num_layers_per_block": [3, 2],
                "clip_text_in_channels": 16,
                "clip_text_pooled_in_channels": 16,
                "clip_image_in_channels": 12,
                "clip_seq": 2,
            },
            vars={"B": 2, "H": 256, "W": 256, "C": 4, "T": 5, "E": 16, "P": 16, "Q": 12},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config=_CONFIG
            | {
                "in_channels": 16,
                "out_channels": 16,
                "timestep_ratio_embedding_dim": 64,
                "conditioning_dim": 2048,
                "block_out_channels": [2048, 2048],
                "num_attention_heads": [32, 32],
                "down_num_layers_per_block": [8, 24],
                "up_num_layers_per_block": [24, 8],
                "clip_text_in_channels": 1280,
                "clip_text_pooled_in_channels": 1280,
                "clip_image_in_channels": 768,
                "clip_seq": 4,
            },
            vars={"B": 3, "H": 1024, "W": 1024, "C": 16, "T": 77, "E": 1280, "P": 1280, "Q": 768},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=3_589_103_632,
        published="3.6B",
        sizes={
            "C": "in_channels",
            "E": "clip_text_in_channels",
            "P": "clip_text_pooled_in_channels",
            "Q": "clip_image_in_channels",
        },
        block_classes=("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
)
