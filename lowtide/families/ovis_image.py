"""Ovis Image: Flux's blocks with gated feed-forwards.

Single blocks cut gate and value from one projection, inline, and keep the product of both: there is no module whose
recomputation would drop a byte, so that stack declares no feed-forward.
"""

from dataclasses import replace

from lowtide.families.joint_streams import DOUBLE, INPUTS, LET, SINGLE, SIZES, TINY, TINY_VARS
from lowtide.families.row import Build, Family

_SINGLE = replace(SINGLE, feed_forward=())

ROWS = (
    Family(
        key="ovis_image",
        title="Ovis Image",
        aliases=("ovis", "OvisImage", "Ovis-Image-7B"),
        class_path="diffusers.OvisImageTransformer2DModel",
        stacks=(DOUBLE, _SINGLE),
        tiny=Build(
            config=TINY | {"out_channels": 4},
            vars=TINY_VARS,
            let=LET,
            inputs=INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 256, "E": 2048},
            let=LET,
            inputs=INPUTS,
        ),
        parameters=7_370_449_728,
        published="7B (rounded)",
        sizes=SIZES,
        block_classes=("OvisImageTransformerBlock", "OvisImageSingleTransformerBlock"),
    ),
)
