"""Anima: the transformer of Cosmos 2 Image, and the small model that turns language model states into its text."""

from lowtide.families import cosmos2
from lowtide.families.inputs import mask, ones, randint, randn
from lowtide.families.row import Build, Family, Stack

_CONDITIONER_INPUTS = {
    "source_hidden_states": randn("B", "Q", "E"),
    "target_input_ids": randint("B", "T", high=32),
    "target_attention_mask": ones("B", "T"),
    "source_attention_mask": ones("B", "Q"),
}

ROWS = (
    Family(
        key="anima",
        title="Anima",
        aliases=("Anima (DiT)", "Anima base v1.0"),
        class_path=cosmos2.CLASS,
        stacks=cosmos2.STACKS,
        tiny=cosmos2.TINY,
        real=Build(
            config=cosmos2.REAL_CONFIG,
            vars={"B": 1, "H": 1024, "W": 1024, "C": 16, "T": 512, "E": 1024, "M": 1},
            let=cosmos2.LET,
            inputs=cosmos2.INPUTS,
        ),
        parameters=cosmos2.PARAMETERS,
        published="2B (rounded)",
        variants=cosmos2.VARIANTS,
        sizes=cosmos2.SIZES,
        block_classes=cosmos2.BLOCK_CLASSES,
    ),
    Family(
        key="anima_text_conditioner",
        title="Anima text conditioner",
        aliases=("anima_conditioner",),
        class_path="diffusers.AnimaTextConditioner",
        stacks=(
            Stack(
                name="blocks",
                blocks=("blocks.*",),
                feed_forward=(("norm_mlp", "mlp"),),
                attention=("self_attn", "cross_attn"),
                attention_norms=("norm_self_attn", "norm_cross_attn"),
            ),
        ),
        tiny=Build(
            config={
                "source_dim": 16,
                "target_dim": 16,
                "model_dim": 16,
                "num_layers": 8,
                "num_attention_heads": 2,
                "mlp_ratio": 2.0,
                "target_vocab_size": 32,
                "min_sequence_length": 8,
            },
            vars={"B": 2, "T": 6, "Q": 5, "E": 16},
            let={},
            inputs=_CONDITIONER_INPUTS
            | {
                "target_attention_mask": mask("B", "T", lengths=("T", "T-2")),
                "source_attention_mask": mask("B", "Q", lengths=("Q", "Q-2")),
            },
        ),
        real=Build(
            config={},
            vars={"B": 1, "T": 512, "Q": 512, "E": 1024},
            let={},
            inputs=_CONDITIONER_INPUTS,
        ),
        parameters=134_663_680,
        published="0.13B",
        sizes={"E": "source_dim"},
        block_classes=("AnimaTextConditionerBlock",),
    ),
)
