"""ERNIE 4.5 Image. Between its blocks the hidden states are sequence first: [S, B, C]."""

from lowtide.families.inputs import per_row, rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timestep": rand("B", scale=1000.0),
    "text_bth": randn("B", "T", "E"),
    "text_lens": per_row("T"),
}

ROWS = (
    Family(
        key="ernie_image",
        title="ERNIE 4.5 Image",
        aliases=("ernie", "ERNIE Image", "ERNIE-Image"),
        class_path="diffusers.ErnieImageTransformer2DModel",
        stacks=(
            Stack(
                name="layers",
                blocks=("layers.*",),
                feed_forward=(("mlp",),),
                attention=("self_attention",),
                attention_norms=("adaLN_sa_ln",),
            ),
        ),
        tiny=Build(
            config={
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_layers": 8,
                "ffn_hidden_size": 64,
                "in_channels": 16,
                "out_channels": 16,
                "patch_size": 1,
                "text_in_dim": 24,
                "rope_theta": 256,
                "rope_axes_dim": (8, 4, 4),
            },
            vars={"B": 2, "H": 80, "W": 64, "C": 16, "T": 7, "E": 24},
            let=_LET,
            inputs=_INPUTS | {"text_lens": per_row("T", "T-2")},
        ),
        real=Build(
            # The class defaults (24 blocks of width 3072) are not the checkpoint.
            config={
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_layers": 36,
                "ffn_hidden_size": 12288,
                "text_in_dim": 3072,
            },
            vars={"B": 1, "H": 512, "W": 512, "C": 128, "T": 256, "E": 3072},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=8_033_490_048,
        published="8B",
        sizes={"C": "in_channels", "E": "text_in_dim"},
        block_classes=("ErnieImageSharedAdaLNBlock",),
    ),
)
