"""MiniMax H3: one packed sequence of text, audio and video. The structural arguments have no batch dimension."""

from lowtide.families.inputs import count, full, grid, joined, rand, randn, zeros
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//4+1", "h": "H//32", "w": "W//32", "S": "F*h*w"}
_VIDEO, _TEXT, _AUDIO = 0, 1, 2
_INPUTS = {
    "hidden_states": randn("B", "S", "C"),
    "audio_hidden_states": randn("B", "A", "CA"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand(2),
    "timestep_indices": joined(zeros("T", dtype="int64"), full(1, "A+S", dtype="int64"), dim=0),
    "token_tags": joined(
        full(_TEXT, "T", dtype="int64"),
        full(_AUDIO, "A", dtype="int64"),
        full(_VIDEO, "S", dtype="int64"),
        dim=0,
    ),
    "position_ids": joined(zeros("T+A", 3), grid("F", "h", "w"), dim=0),
    "text_indices": count("T"),
    "audio_indices": count("A", start="T"),
    "video_indices": count("S", start="T+A"),
}

ROWS = (
    Family(
        key="minimax_h3",
        title="MiniMax H3",
        aliases=("MiniMax H3 T2V",),
        class_path="diffusers.MiniMaxH3Transformer3DModel",
        stacks=(
            Stack(
                name="token_refiner.refiner_blocks",
                blocks=("token_refiner.refiner_blocks.*",),
                feed_forward=(("norm2", "ff"),),
                attention=("attn",),
                attention_norms=("norm1",),
            ),
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",),),
                attention=("attn",),
                attention_norms=("norm1",),
            ),
        ),
        tiny=Build(
            config={
                "num_attention_heads": 2,
                "attention_head_dim": 32,
                "hidden_size": 32,
                "num_layers": 8,
                "num_refiner_layers": 2,
                "ffn_dim": 64,
                "in_channels": 4,
                "audio_in_channels": 8,
                "text_dim": 24,
                "freq_dim": 16,
                "time_embed_hidden_dim": 32,
                "time_embed_dim": 16,
                "rope_freq_dim": 4,
            },
            vars={"B": 2, "FR": 5, "H": 64, "W": 96, "A": 3, "C": 16, "CA": 8, "T": 5, "E": 24},
            let=_LET,
            inputs=_INPUTS,
        ),
        # No example states a shape; 50 audio tokens a second are a guess.
        real=Build(
            config={},
            vars={"B": 1, "FR": 49, "H": 768, "W": 1344, "A": 100, "C": 96, "CA": 32, "T": 512, "E": 5120},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=33_122_992_896,
        published="33B",
        sizes={"C": "in_channels*4", "CA": "audio_in_channels", "E": "text_dim"},  # patches of 2 by 2
        block_classes=("MiniMaxH3TokenRefinerBlock", "MiniMaxH3TransformerBlock"),
    ),
)
