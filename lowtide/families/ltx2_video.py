"""LTXVideo2 2.3: video and audio streams in one block, with six attentions: self, text and each other's, both ways."""

from lowtide.families.inputs import rand, randn, size
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//8+1", "h": "H//32", "w": "W//32", "A": "FR"}  # 25 audio tokens a second, 25 frames
_INPUTS = {
    "hidden_states": randn("B", "F*h*w", "C"),
    "audio_hidden_states": randn("B", "A", "CA"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "audio_encoder_hidden_states": randn("B", "T", "EA"),
    "timestep": rand("B", scale=1000.0),
    "sigma": rand("B"),
    "num_frames": size("F"),
    "height": size("h"),
    "width": size("w"),
    "audio_num_frames": size("A"),
    "fps": 25.0,
}
_VERSION_2_3 = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}

ROWS = (
    Family(
        key="ltx2_3",
        title="LTXVideo2 2.3",
        aliases=("ltxvideo2", "ltx2"),
        class_path="diffusers.LTX2VideoTransformer3DModel",
        stacks=(
            Stack(
                name="transformer_blocks",
                blocks=("transformer_blocks.*",),
                feed_forward=(("ff",), ("audio_ff",)),
                attention=(
                    "attn1",
                    "audio_attn1",
                    "attn2",
                    "audio_attn2",
                    "audio_to_video_attn",
                    "video_to_audio_attn",
                ),
                attention_norms=(
                    "norm1",
                    "audio_norm1",
                    "norm2",
                    "audio_norm2",
                    "audio_to_video_norm",
                    "video_to_audio_norm",
                ),
            ),
        ),
        tiny=Build(
            config=_VERSION_2_3
            | {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "cross_attention_dim": 16,
                "audio_in_channels": 4,
                "audio_out_channels": 4,
                "audio_num_attention_heads": 2,
                "audio_attention_head_dim": 4,
                "audio_cross_attention_dim": 8,
                "num_layers": 8,
                "caption_channels": 12,
                "rope_double_precision": False,
            },
            vars={"B": 2, "FR": 9, "H": 96, "W": 64, "C": 4, "CA": 4, "T": 6, "E": 16, "EA": 8},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config=_VERSION_2_3,
            vars={"B": 1, "FR": 49, "H": 704, "W": 1280, "C": 128, "CA": 128, "T": 1024, "E": 4096, "EA": 2048},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=18_988_838_144,
        published="22B (19.0B transformer and 3.2B text connectors)",
        variants={
            "time step per token": {
                "timestep": rand("B", "F*h*w", scale=1000.0),
                "audio_timestep": rand("B", "A", scale=1000.0),
            },
            "streams apart": {"isolate_modalities": True},
        },
        # Version 2.0 projects its text embeddings itself.
        sizes={
            "C": "in_channels",
            "CA": "audio_in_channels",
            "E": "use_prompt_embeddings*caption_channels+(1-use_prompt_embeddings)*cross_attention_dim",
            "EA": "use_prompt_embeddings*caption_channels+(1-use_prompt_embeddings)*audio_cross_attention_dim",
        },
        block_classes=("LTX2VideoTransformerBlock",),
    ),
)
