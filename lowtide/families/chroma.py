"""Chroma: Flux's blocks with the modulation of every block cut from one tensor that a small network makes."""

from lowtide.families.inputs import grid, mask, ones, rand, randn, several, zeros
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
        key="chroma",
        title="Chroma",
        aliases=("chroma1", "Chroma1-HD", "Chroma1-Base"),
        class_path="diffusers.ChromaTransformer2DModel",
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
                "axes_dims_rope": (4, 4, 8),
                "approximator_num_channels": 8,
                "approximator_hidden_dim": 16,
                "approximator_layers": 1,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 512, "E": 4096},
            let=_LET,
            inputs=_INPUTS | {"attention_mask": ones("B", "T+S", dtype="bool")},
        ),
        parameters=8_899_983_424,
        published="8.9B",
        variants={
            "ControlNet residuals": {
                "controlnet_block_samples": several(3, randn("B", "S", 32)),
                "controlnet_single_block_samples": several(4, randn("B", "S", 32)),
            },
            "attention mask": {"attention_mask": mask("B", "T+S", lengths=("T+S", "T+S-8"), dtype="bool")},
        },
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    ),
)
