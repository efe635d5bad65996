"""Flux.1 (dev; schnell is the same without guidance)."""

from lowtide.families.inputs import full, grid, rand, randn, several, when, zeros
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "pooled_projections": randn("B", "P"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w"),
    "txt_ids": zeros("T", 3),
    "guidance": when("G", full(3.5, "B")),
}

ROWS = (
    Family(
        key="flux1",
        title="Flux.1",
        aliases=("flux", "FLUX.1-dev", "FLUX.1-schnell"),
        class_path="diffusers.FluxTransformer2DModel",
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
                "guidance_embeds": True,
                "axes_dims_rope": (4, 4, 8),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 32, "P": 32, "G": 1},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={"guidance_embeds": True},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 512, "E": 4096, "P": 768, "G": 1},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=11_901_408_320,
        published="12B",
        variants={
            "ControlNet residuals": {
                "controlnet_block_samples": several(3, randn("B", "S", 32)),
                "controlnet_single_block_samples": several(4, randn("B", "S", 32)),
            }
        },
        sizes={"C": "in_channels", "E": "joint_attention_dim", "P": "pooled_projection_dim", "G": "guidance_embeds"},
        block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    ),
)
