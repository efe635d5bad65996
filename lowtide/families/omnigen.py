"""OmniGen: one sequence of text ids, a time token and image patches. Prompts are token ids, embedded in the model."""

from lowtide.families.inputs import count, ones, rand, randint, randn
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//8", "w": "W//8", "N": "T+1+(h//2)*(w//2)"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timestep": rand("B"),
    "input_ids": randint("B", "T", high=50),
    "input_img_latents": [],
    "input_image_sizes": {},
    "attention_mask": ones("B", "N", "N", dtype="compute"),
    "position_ids": count("B", "N"),
}

ROWS = (
    Family(
        key="omnigen",
        title="OmniGen",
        aliases=("OmniGen v1", "OmniGen-v1"),
        class_path="diffusers.OmniGenTransformer2DModel",
        stacks=(
            Stack(
                name="layers",
                blocks=("layers.*",),
                feed_forward=(("post_attention_layernorm", "mlp"),),
                attention=("self_attn",),
                attention_norms=("input_layernorm",),
            ),
        ),
        tiny=Build(
            config={
                "in_channels": 4,
                "patch_size": 2,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "intermediate_size": 32,
                "num_layers": 8,
                "pad_token_id": 0,
                "vocab_size": 64,
                "rope_scaling": {"long_factor": [1.0, 1.0], "short_factor": [1.0, 1.0]},
                "pos_embed_max_size": 8,
                "time_step_dim": 4,
            },
            vars={"B": 2, "H": 64, "W": 64, "C": 4, "T": 6},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            # The checkpoint's factors rescale positions: neither time nor memory depends on their values.
            config={"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
            vars={"B": 1, "H": 1024, "W": 1024, "C": 4, "T": 128},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=3_762_072_592,
        published="3.8B",
        sizes={"C": "in_channels"},
        block_classes=("OmniGenBlock",),
    ),
)
