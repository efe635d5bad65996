"""Flux.1 (dev; schnell is the same without guidance)."""

from lowtide.families.inputs import full, randn, when
from lowtide.families.joint_streams import DOUBLE, INPUTS, LET, SINGLE, SIZES, TINY, TINY_RESIDUALS, TINY_VARS
from lowtide.families.row import Build, Family

_INPUTS = INPUTS | {"pooled_projections": randn("B", "P"), "guidance": when("G", full(3.5, "B"))}

_BLOCK = r"(single_)?transformer_blocks\.\d+\."
_ATTENTION = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_FEED_FORWARD = r"(ff|ff_context)\.net\.(0\.proj|2)|proj_mlp|proj_out"

ROWS = (
    Family(
        key="flux1",
        title="Flux.1",
        aliases=("flux", "FLUX.1-dev", "FLUX.1-schnell"),
        class_path="diffusers.FluxTransformer2DModel",
        stacks=(DOUBLE, SINGLE),
        lora_targets=f"{_BLOCK}({_ATTENTION}|{_FEED_FORWARD})",
        tiny=Build(
            config=TINY | {"pooled_projection_dim": 32, "guidance_embeds": True},
            vars=TINY_VARS | {"P": 32, "G": 1},
            let=LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={"guidance_embeds": True},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 64, "T": 512, "E": 4096, "P": 768, "G": 1},
            let=LET,
            inputs=_INPUTS,
        ),
        parameters=11_901_408_320,
        published="12B",
        variants={"ControlNet residuals": TINY_RESIDUALS},
        sizes=SIZES | {"P": "pooled_projection_dim", "G": "guidance_embeds"},
        block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    ),
)
