"""Flux.3 Image Klein: text, image and reference image each have a stream of blocks, then one joint stream.

Reference images are optional: their stream runs only where ``image_cond_hidden_states`` is given.
"""

from lowtide.families.inputs import grid, rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B"),
    "img_ids": grid(1, "h", "w", 1, scale=(1.0, 0.5, 0.5, 1.0)),
    "txt_ids": grid(1, 1, 1, "T"),
}
_REFERENCE = {
    "image_cond_hidden_states": randn("B", "S", "C"),
    "image_cond_ids": grid(1, "h", "w", 1, scale=(1.0, 0.5, 0.5, 1.0), offset=(0.0, 0.0, 0.0, -1.0)),
}


def _stack(name: str) -> Stack:
    """One norm feeds attention and feed-forward side by side."""
    return Stack(name, (f"{name}.*",), feed_forward=(("ff",),), attention=("attn",), attention_norms=("norm",))


ROWS = (
    Family(
        key="flux3_klein",
        title="Flux.3 Image Klein",
        aliases=("flux3", "flux3_image", "FLUX.3-klein", "FLUX.3 Klein"),
        class_path="diffusers.Flux3Transformer2DModel",
        stacks=(
            _stack("txt_mode_blocks"),
            _stack("mode_blocks.image"),
            _stack("mode_blocks.image_cond"),
            _stack("single_transformer_blocks"),
        ),
        tiny=Build(
            config={
                "in_channels": 8,
                "cond_in_channels": 8,
                "num_layers": 3,
                "num_single_layers": 8,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "timestep_channels": 32,
                "axes_dims_rope": (4, 4, 4, 4),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 8, "T": 6, "E": 32},
            let=_LET,
            inputs=_INPUTS | _REFERENCE,
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 512, "W": 512, "C": 128, "T": 80, "E": 20480},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=5_538_458_368,
        published="5.6B (rounded)",
        sizes={"C": "in_channels", "E": "joint_attention_dim"},
        block_classes=("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"),
    ),
)
