"""LongCat Image: Flux's blocks with positions of its own for the text."""

from lowtide.families.inputs import grid
from lowtide.families.joint_streams import DOUBLE, INPUTS, LET, SINGLE, SIZES, TINY, TINY_VARS
from lowtide.families.row import Build, Family

_INPUTS = INPUTS | {"img_ids": grid(1, "h", "w", offset=(1, 0, 0)), "txt_ids": grid(1, "T", 1)}

ROWS = (
    Family(
        key="longcat_image",
        title="LongCat Image",
        aliases=("longcat", "LongCat-Image"),
        class_path="diffusers.LongCatImageTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        tiny=Build(
            config=TINY | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
            vars=TINY_VARS,
            let=LET,
            inputs=_INPUTS,
        ),
        real=Build(
            # The class defaults (19 and 38 blocks) are not the checkpoint: they have 11.9B parameters.
            config={"num_layers": 10, "num_single_layers": 20},
            vars={"B": 1, "H": 512, "W": 512, "C": 64, "T": 512, "E": 3584},
            let=LET,
            inputs=_INPUTS,
        ),
        parameters=6_270_668_864,
        published="6B (rounded)",
        sizes=SIZES,
        block_classes=("LongCatImageTransformerBlock", "LongCatImageSingleTransformerBlock"),
    ),
)
