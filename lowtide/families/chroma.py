"""Chroma: Flux's blocks with the modulation of every block cut from one tensor that a small network makes."""

from lowtide.families.inputs import mask, ones
from lowtide.families.joint_streams import DOUBLE, INPUTS, LET, SINGLE, SIZES, TINY, TINY_RESIDUALS, TINY_VARS
from lowtide.families.row import Build, Family

ROWS = (
    Family(
        key="chroma",
        title="Chroma",
        aliases=("chroma1", "Chroma1-HD", "Chroma1-Base"),
        class_path="diffusers.ChromaTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        left_out=("distilled_guidance_layer",),  # five small layers over 344 places, once a step
        tiny=Build(
            config=TINY | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
            vars=TINY_VARS,
            let=LET,
            inputs=INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 512, "E": 4096},
            let=LET,
            inputs=INPUTS | {"attention_mask": ones("B", "T+S", dtype="bool")},
        ),
        parameters=8_899_983_424,
        published="8.9B",
        variants={
            "ControlNet residuals": TINY_RESIDUALS,
            "attention mask": {"attention_mask": mask("B", "T+S", lengths=("T+S", "T+S-8"), dtype="bool")},
        },
        sizes=SIZES,
        block_classes=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    ),
)
