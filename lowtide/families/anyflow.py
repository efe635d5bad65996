"""AnyFlow: Wan 2.1 with a second time step, both of them per frame. Its latents have frames before channels."""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "F", "C", "h", "w"),
    "timestep": rand("B", "F", scale=1000.0),
    "r_timestep": rand("B", "F", scale=500.0),
    "encoder_hidden_states": randn("B", "T", "E"),
}

ROWS = (
    Family(
        key="anyflow",
        title="AnyFlow",
        aliases=("AnyFlow Wan 2.1 T2V 1.3B",),
        class_path="diffusers.AnyFlowTransformer3DModel",
        stacks=(
            Stack(
                name="blocks",
                blocks=("blocks.*",),
                feed_forward=(("ffn",),),
                attention=("attn1", "attn2"),
                attention_norms=("norm1", "norm2"),
            ),
        ),
        tiny=Build(
            config={
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 16,
                "freq_dim": 16,
                "ffn_dim": 32,
                "num_layers": 8,
                "rope_max_seq_len": 32,
            },
            vars={"B": 2, "FR": 5, "H": 48, "W": 48, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
            vars={"B": 1, "FR": 81, "H": 480, "W": 832, "C": 16, "T": 512, "E": 4096},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=1_421_752_384,
        published="1.3B (1.42B, as its base Wan 2.1)",
        sizes={"C": "in_channels", "E": "text_dim"},
        block_classes=("AnyFlowTransformerBlock",),
    ),
)
