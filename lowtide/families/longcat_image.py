"""LongCat Image: Flux's blocks with positions of its own for the text."""

from lowtide.families.inputs import grid, rand, randn
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w", offset=(1, 0, 0)),
    "txt_ids": grid(1, "T", 1),
}

ROWS = (
    Family(
        key="longcat_image",
        title="LongCat Image",
        aliases=("longcat", "LongCat-Image"),
        class_path="diffusers.LongCatImageTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        tiny=Build(
            config={
                "patch_size": 1,
                "in_channels": 4,
                "num_layers": 6,
                "num_single_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": [4, 4, 8],
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            # The class defaults (19 and 38 blocks) are not the checkpoint: they have 11.9B parameters.
            config={"num_layers": 10, "num_single_layers": 20},
            vars={"B": 1, "H": 512, "W": 512, "C": 64, "T": 512, "E": 3584},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=6_270_668_864,
        published="6B (rounded)",
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("LongCatImageTransformerBlock", "LongCatImageSingleTransformerBlock"),
    ),
)
