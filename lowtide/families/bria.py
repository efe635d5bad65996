"""Bria 3.2: Flux's blocks, narrower."""

from lowtide.families.inputs import randn, several
from lowtide.families.joint_streams import DOUBLE, INPUTS, LET, SINGLE, SIZES, TINY, TINY_VARS
from lowtide.families.row import Build, Family

ROWS = (
    Family(
        key="bria",
        title="Bria 3.2",
        aliases=("bria_3_2", "BRIA"),
        class_path="diffusers.BriaTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        tiny=Build(
            config=TINY | {"attention_head_dim": 8, "axes_dims_rope": [0, 4, 4]},
            vars=TINY_VARS,
            let=LET,
            inputs=INPUTS,
        ),
        real=Build(
            # The class defaults are not the checkpoint, whose configuration is not public: these fit its stated size.
            config={
                "num_layers": 8,
                "num_single_layers": 28,
                "attention_head_dim": 96,
                "in_channels": 16,
                "axes_dims_rope": [0, 48, 48],
            },
            vars={"B": 1, "H": 1024, "W": 1024, "C": 16, "T": 128, "E": 4096},
            let=LET,
            inputs=INPUTS,
        ),
        parameters=3_785_669_392,
        published="4B (rounded)",
        # No residuals for the single blocks: the class cuts the text off their output, which holds no text.
        variants={"ControlNet residuals": {"controlnet_block_samples": several(3, randn("B", "S", 16))}},
        sizes=SIZES,
        block_classes=("BriaTransformerBlock", "BriaSingleTransformerBlock"),
    ),
)
