"""Z-Image Turbo. Its inputs are lists, one tensor a sample; the text refiner has no modulation."""

from lowtide.families.inputs import numbered, rand, randn, several
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "x": several("B", randn("C", 1, "h", "w")),
    "t": rand("B"),
    "cap_feats": several("B", randn("T", "E")),
}
_UNMODULATED = (("ffn_norm1", "feed_forward", "ffn_norm2"),)
_MODULATED = (("feed_forward", "ffn_norm2"),)

ROWS = (
    Family(
        key="z_image_turbo",
        title="Z-Image Turbo",
        aliases=("z_image",),
        class_path="diffusers.ZImageTransformer2DModel",
        stacks=(
            Stack("noise_refiner", ("noise_refiner.*",), _MODULATED, ("attention",), ("attention_norm1",)),
            Stack("context_refiner", ("context_refiner.*",), _UNMODULATED, ("attention",), ("attention_norm1",)),
            Stack("layers", ("layers.*",), _MODULATED, ("attention",), ("attention_norm1",)),
        ),
        tiny=Build(
            config={
                "all_patch_size": (2,),
                "all_f_patch_size": (1,),
                "in_channels": 4,
                "dim": 32,
                "n_layers": 8,
                "n_refiner_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": 16,
                "axes_dims": [8, 4, 4],
                "axes_lens": [160, 32, 32],
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 40, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"cap_feats": [randn(7, "E"), randn("T", "E")]},
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 16, "T": 256, "E": 2560},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=6_154_908_736,
        published="6B",
        variants={
            "ControlNet residuals": {
                "controlnet_block_samples": numbered({0: randn("B", 96, 32), 4: randn("B", 96, 32)}),
            }
        },
        sizes={"C": "in_channels", "E": "cap_feat_dim"},
        block_classes=("ZImageTransformerBlock",),
    ),
)
