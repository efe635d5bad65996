"""PRX. Its gated MLP is inline in the block: gate and its activation, up, and after their product down."""

from lowtide.families.inputs import mask, ones, rand, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timestep": rand("B"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "attention_mask": ones("B", "T", dtype="bool"),
}

ROWS = (
    Family(
        key="prx",
        title="PRX",
        aliases=("PRX 1.3B", "Photoroom PRX"),
        class_path="diffusers.PRXTransformer2DModel",
        stacks=(
            Stack(
                name="blocks",
                blocks=("blocks.*",),
                feed_forward=(("gate_proj", "mlp_act"), ("up_proj",), ("down_proj",)),
                attention=("attention",),
                attention_norms=("img_pre_norm",),
            ),
        ),
        tiny=Build(
            config={
                "in_channels": 4,
                "patch_size": 2,
                "context_in_dim": 16,
                "hidden_size": 16,
                "mlp_ratio": 3.5,
                "num_heads": 2,
                "depth": 8,
                "axes_dim": [4, 4],
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"attention_mask": mask("B", "T", lengths=("T", "T-2"), dtype="bool")},
        ),
        real=Build(
            config={},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 16, "T": 256, "E": 2304},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=1_170_691_648,
        published="1.3B (the released transformer counts 1.17B)",
        sizes={"C": "in_channels", "E": "context_in_dim"},
        block_classes=("PRXBlock",),
    ),
)
