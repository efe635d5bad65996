"""Ovis Image: Flux's blocks with gated feed-forwards.

Single blocks cut gate and value from one projection, inline, and keep the product of both: there is no module whose
recomputation would drop a byte, so that stack declares no feed-forward.
"""

from dataclasses import replace

from lowtide.families.inputs import grid, rand, randn, zeros
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_SINGLE = replace(SINGLE, feed_forward=())
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w"),
    "txt_ids": zeros("T", 3),
}

ROWS = (
    Family(
        key="ovis_image",
        title="Ovis Image",
        aliases=("ovis", "OvisImage", "Ovis-Image-7B"),
        class_path="diffusers.OvisImageTransformer2DModel",
        stacks=(DOUBLE, _SINGLE),
        tiny=Build(
            config={
                "patch_size": 1,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 6,
                "num_single_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": (4, 4, 8),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 256, "E": 2048},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=7_370_449_728,
        published="7B (rounded)",
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("OvisImageTransformerBlock", "OvisImageSingleTransformerBlock"),
    ),
)
