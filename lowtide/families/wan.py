"""Wan 2.1 text-to-video, 1.3B and 14B: one class, one stack, two sizes."""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family, Stack

_CLASS = "diffusers.WanTransformer3DModel"
STACKS = (
    Stack(
        name="blocks",
        blocks=("blocks.*",),
        feed_forward=(("ffn",),),
        attention=("attn1", "attn2"),
        attention_norms=("norm1", "norm2"),
    ),
)
LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "F", "h", "w"),
    "timestep": rand("B", scale=1000.0),
    "encoder_hidden_states": randn("B", "T", "E"),
}
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 8,
    "rope_max_seq_len": 32,
}
TINY_VARS = {"B": 2, "FR": 5, "H": 48, "W": 48, "C": 4, "T": 6, "E": 16}
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
"""The 1.3B size."""
_TINY = Build(config=TINY | {"patch_size": (1, 2, 2)}, vars=TINY_VARS, let=LET, inputs=_INPUTS)
REAL_VARS = {"B": 1, "FR": 81, "H": 480, "W": 832, "C": 16, "T": 512, "E": 4096}
_VARIANTS = {"time step per token": {"timestep": rand("B", "F*(h//2)*(w//2)", scale=1000.0)}}
SIZES = {"C": "in_channels", "E": "text_dim"}
_BLOCK_CLASSES = ("WanTransformerBlock",)

ROWS = (
    Family(
        key="wan21_1_3b",
        title="Wan 2.1 1.3B",
        aliases=("wan", "wan21", "Wan 2.1 T2V 1.3B"),
        class_path=_CLASS,
        stacks=STACKS,
        tiny=_TINY,
        real=Build(
            config=SMALL,
            vars=REAL_VARS,
            let=LET,
            inputs=_INPUTS,
        ),
        parameters=1_418_996_800,
        published="1.3B (the released weights count 1.42B)",
        variants=_VARIANTS,
        sizes=SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
    Family(
        key="wan21_14b",
        title="Wan 2.1 14B",
        aliases=("Wan 2.1 T2V 14B",),
        class_path=_CLASS,
        stacks=STACKS,
        tiny=_TINY,
        real=Build(config={}, vars=REAL_VARS, let=LET, inputs=_INPUTS),
        parameters=14_288_491_584,
        published="14B",
        sizes=SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
)
