"""ACE Step 1.5 (music): every second block attends in a sliding window. XL is the same class, wider and deeper."""

from lowtide.families.inputs import rand, randn
from lowtide.families.row import Build, Family, Stack

_INPUTS = {
    "hidden_states": randn("B", "L", "C"),
    "timestep": rand("B"),
    "timestep_r": rand("B"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "context_latents": randn("B", "L", "CC"),
}

ROWS = (
    Family(
        key="ace_step_15",
        title="ACE Step 1.5",
        aliases=("ace_step", "ACE-Step v1.5"),
        class_path="diffusers.AceStepTransformer1DModel",
        stacks=(
            Stack(
                name="layers",
                blocks=("layers.*",),
                feed_forward=(("mlp",),),
                attention=("self_attn", "cross_attn"),
                attention_norms=("self_attn_norm", "cross_attn_norm"),
            ),
        ),
        tiny=Build(
            config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "in_channels": 24,
                "audio_acoustic_hidden_dim": 8,
                "rope_theta": 10000.0,
                "sliding_window": 3,
                "encoder_hidden_size": 16,
            },
            vars={"B": 2, "L": 16, "C": 8, "CC": 16, "T": 6, "E": 16},
            let={},
            inputs=_INPUTS,
        ),
        # Latents at 25 Hz, 60 s. The public example states no length; how many text and lyric tokens it has, neither.
        real=Build(
            config={"encoder_hidden_size": 2048},
            vars={"B": 1, "SEC": 60, "C": 64, "CC": 128, "T": 512, "E": 2048},
            let={"L": "25*SEC"},
            inputs=_INPUTS,
        ),
        parameters=1_575_458_880,
        published="2B (the release; its transformer is 1.6B)",
        sizes={
            "C": "audio_acoustic_hidden_dim",
            "CC": "in_channels-audio_acoustic_hidden_dim",
            "E": "encoder_hidden_size",
        },
        block_classes=("AceStepTransformerBlock",),
    ),
)
