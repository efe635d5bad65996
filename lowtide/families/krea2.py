"""Krea 2. Its text comes as the states of several layers of a language model, which two small stacks fuse.

The layerwise blocks see each token as a sequence of its own, over the layers: batch B*T, length 12.
"""

from lowtide.families.inputs import grid, joined, mask, ones, rand, randn, zeros
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//16", "w": "W//16", "S": "h*w"}
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "encoder_hidden_states": randn("B", "T", "NL", "E"),
    "timestep": rand("B"),
    "position_ids": joined(zeros("T", 3), grid(1, "h", "w"), dim=0),
    "encoder_attention_mask": ones("B", "T", dtype="bool"),
}


def _fusion(name: str) -> Stack:
    return Stack(name, (f"{name}.*",), (("norm2", "ff"),), attention=("attn",), attention_norms=("norm1",))


ROWS = (
    Family(
        key="krea2",
        title="Krea 2",
        aliases=("krea", "Krea-2-Raw", "Krea-2-Turbo"),
        class_path="diffusers.Krea2Transformer2DModel",
        stacks=(
            _fusion("text_fusion.layerwise_blocks"),
            _fusion("text_fusion.refiner_blocks"),
            Stack("transformer_blocks", ("transformer_blocks.*",), (("ff",),), ("attn",), ("norm1",)),
        ),
        tiny=Build(
            config={
                "in_channels": 4,
                "num_layers": 8,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 32,
                "timestep_embed_dim": 16,
                "text_hidden_dim": 16,
                "num_text_layers": 3,
                "text_num_attention_heads": 2,
                "text_num_key_value_heads": 2,
                "text_intermediate_size": 32,
                "num_layerwise_text_blocks": 2,
                "num_refiner_text_blocks": 2,
                "axes_dims_rope": (4, 2, 2),
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 5, "NL": 3, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"), dtype="bool")},
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 512, "W": 512, "C": 64, "T": 512, "NL": 12, "E": 2560},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=12_820_073_036,
        published="12.8B (counted: no public figure)",
        sizes={"C": "in_channels", "NL": "num_text_layers", "E": "text_hidden_dim"},
        block_classes=("Krea2TextFusionBlock", "Krea2TransformerBlock"),
    ),
)
