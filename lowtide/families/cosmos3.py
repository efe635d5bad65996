"""Cosmos 3 Nano and Edge: two towers (understanding, generation) that meet in attention, over one packed sequence.

There is no batch dimension. The heads for sound and action, and the vision encoder, are left out.
"""

from lowtide.families.inputs import count, fixed, full, randint, randn, size
from lowtide.families.row import Build, Family, Stack

_CLASS = "diffusers.Cosmos3OmniTransformer"
_STACKS = (
    Stack(
        name="layers",
        blocks=("layers.*",),
        # Generation first: nothing reads what understanding makes in the last block, so it is not recomputed there.
        feed_forward=(
            ("post_attention_layernorm_moe_gen", "mlp_moe_gen"),
            ("post_attention_layernorm", "mlp"),
        ),
        attention=("self_attn",),
        attention_norms=("input_layernorm", "input_layernorm_moe_gen"),
    ),
)
_LET = {"F": "(FR-1)//4+1", "h": "(H+31)//32", "w": "(W+31)//32", "S": "F*h*w", "N": "T+S"}
_INPUTS = {
    "input_ids": randint("T", high=32),
    "text_indexes": count("T"),
    "position_ids": count(3, "N"),
    "und_len": size("T"),
    "sequence_length": size("N"),
    "vision_tokens": [randn(1, "C", "F", "2*h", "2*w")],
    "vision_token_shapes": [fixed(size("F"), size("h"), size("w"))],
    "vision_sequence_indexes": count("S", start="T"),
    "vision_mse_loss_indexes": count("S", start="T"),
    "vision_timesteps": full(500.0, "S", dtype="float32"),
    "vision_noisy_frame_indexes": [count("F")],
}
_TINY = {
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "latent_channel": 4,
    "patch_latent_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "rope_axes_dim": [2, 1, 1],
    "rope_theta": 10000.0,
    "vocab_size": 32,
}
_TINY_VARS = {"FR": 5, "H": 96, "W": 64, "C": 4, "T": 5}
_REAL_VARS = {"FR": 1, "H": 1024, "W": 1024, "C": 48, "T": 256}
_SIZES = {"C": "latent_channel"}
_BLOCK_CLASSES = ("Cosmos3VLTextMoTDecoderLayer",)
_NEMOTRON = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}

ROWS = (
    Family(
        key="cosmos3",
        title="Cosmos 3",
        aliases=("Cosmos 3 Nano",),
        class_path=_CLASS,
        stacks=_STACKS,
        tiny=Build(config=_TINY, vars=_TINY_VARS, let=_LET, inputs=_INPUTS),
        real=Build(config={}, vars=_REAL_VARS, let=_LET, inputs=_INPUTS),
        parameters=15_156_222_144,
        published="16B (15.2B without vision encoder, sound and action heads)",
        sizes=_SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
    Family(
        key="cosmos3_edge",
        title="Cosmos 3 Edge",
        class_path=_CLASS,
        stacks=_STACKS,
        tiny=Build(config=_TINY | _NEMOTRON, vars=_TINY_VARS, let=_LET, inputs=_INPUTS),
        real=Build(
            config=_NEMOTRON
            | {
                "hidden_size": 2048,
                "intermediate_size": 9216,
                "num_attention_heads": 16,
                "num_hidden_layers": 28,
                "rms_norm_eps": 1e-5,
                "rope_theta": 100_000_000.0,
                "vocab_size": 131_072,
            },
            vars=_REAL_VARS,
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=3_361_198_784,
        published="4B (3.4B without vision encoder and action heads)",
        sizes=_SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
)
