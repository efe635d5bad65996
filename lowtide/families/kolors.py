"""Kolors: SDXL's U-Net, with ChatGLM's text states projected to its width inside the model."""

from lowtide.families import sdxl, unet
from lowtide.families.row import Build, Family

ROWS = (
    Family(
        key="kolors",
        title="Kolors",
        aliases=("Kolors 1.0", "Kwai-Kolors"),
        class_path=unet.CLASS,
        stacks=unet.STACKS,
        tiny=Build(
            config=sdxl.TINY_CONFIG | {"encoder_hid_dim": 24, "encoder_hid_dim_type": "text_proj"},
            vars={"B": 2, "H": 128, "W": 128, "C": 4, "T": 6, "E": 24, "P": 16},
            let=unet.LET,
            inputs=sdxl.INPUTS,
        ),
        real=Build(
            config=sdxl.REAL_CONFIG
            | {
                "projection_class_embeddings_input_dim": 5632,
                "encoder_hid_dim": 4096,
                "encoder_hid_dim_type": "text_proj",
            },
            vars={"B": 1, "H": 1024, "W": 1024, "C": 4, "T": 256, "E": 4096, "P": 4096},
            let=unet.LET,
            inputs=sdxl.INPUTS,
        ),
        parameters=2_579_458_820,
        published="2.6B (U-Net)",
        sizes=sdxl.SIZES | {"E": "encoder_hid_dim"},
        block_classes=unet.BLOCK_CLASSES,
    ),
)
