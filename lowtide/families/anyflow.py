"""AnyFlow: Wan 2.1 with a second time step, both of them per frame. Its latents have frames before channels."""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family
from lowtide.families.wan import LET, REAL_VARS, SIZES, SMALL, STACKS, TINY, TINY_VARS

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
        stacks=STACKS,
        tiny=Build(config=TINY, vars=TINY_VARS, let=LET, inputs=_INPUTS),
        real=Build(config=SMALL, vars=REAL_VARS, let=LET, inputs=_INPUTS),
        parameters=1_421_752_384,
        published="1.3B (1.42B, as its base Wan 2.1)",
        sizes=SIZES,
        block_classes=("AnyFlowTransformerBlock",),
    ),
)
