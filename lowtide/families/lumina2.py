"""Lumina Image 2.0. Call order: text refiner, image refiner, main layers; only the text refiner has no modulation."""

from lowtide.families.inputs import mask, ones, rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timestep": rand("B"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "encoder_attention_mask": ones("B", "T", dtype="bool"),
}
_UNMODULATED = (("ffn_norm1", "feed_forward", "ffn_norm2"),)
_MODULATED = (("feed_forward", "ffn_norm2"),)

ROWS = (
    Family(
        key="lumina2",
        title="Lumina2",
        aliases=("Lumina Image 2.0",),
        class_path="diffusers.Lumina2Transformer2DModel",
        stacks=(
            Stack("context_refiner", ("context_refiner.*",), _UNMODULATED, ("attn",), ("norm1",)),
            Stack("noise_refiner", ("noise_refiner.*",), _MODULATED, ("attn",), ("norm1",)),
            Stack("layers", ("layers.*",), _MODULATED, ("attn",), ("norm1",)),
        ),
        tiny=Build(
            config={
                "sample_size": 16,
                "patch_size": 2,
                "in_channels": 4,
                "hidden_size": 24,
                "num_layers": 8,
                "num_refiner_layers": 2,
                "num_attention_heads": 3,
                "num_kv_heads": 1,
                "multiple_of": 4,
                "axes_dim_rope": (4, 2, 2),
                "axes_lens": (16, 16, 16),
                "cap_feat_dim": 16,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"), dtype="bool")},
        ),
        real=Build(
            config={"cap_feat_dim": 2304, "axes_lens": (300, 512, 512)},
            vars={"B": 2, "H": 512, "W": 512, "C": 16, "T": 256, "E": 2304},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=2_609_769_152,
        published="2.6B",
        sizes={"C": "in_channels", "E": "cap_feat_dim"},
        block_classes=("Lumina2TransformerBlock",),
    ),
)
