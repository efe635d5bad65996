"""Bria 3.2: Flux's blocks, narrower."""

from lowtide.families.inputs import grid, rand, randn, several, zeros
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w"),
    "txt_ids": zeros("T", 3),
}

ROWS = (
    Family(
        key="bria",
        title="Bria 3.2",
        aliases=("bria_3_2", "BRIA"),
        class_path="diffusers.BriaTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        tiny=Build(
            config={
                "patch_size": 1,
                "in_channels": 4,
                "num_layers": 6,
                "num_single_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": [0, 4, 4],
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32},
            let=_LET,
            inputs=_INPUTS,
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
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=3_785_669_392,
        published="4B (rounded)",
        # No residuals for the single blocks: the class cuts the text off their output, which holds no text.
        variants={"ControlNet residuals": {"controlnet_block_samples": several(3, randn("B", "S", 16))}},
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("BriaTransformerBlock", "BriaSingleTransformerBlock"),
    ),
)
