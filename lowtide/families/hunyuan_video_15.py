"""HunyuanVideo 1.5: the refiner and the double blocks of 1.0. Nothing reads the text output of the last block."""

from lowtide.families.hunyuan_video import REFINER
from lowtide.families.inputs import mask, rand, randn, read, zeros
from lowtide.families.joint_streams import DOUBLE
from lowtide.families.row import Build, Family

_LET = {"F": "(FR-1)//4+1", "h": "H//16", "w": "W//16"}
_INPUTS = {
    "hidden_states": randn("B", "C", "F", "h", "w"),
    "timestep": rand("B", scale=1000.0),
    "encoder_hidden_states": randn("B", "T", "E"),
    "encoder_attention_mask": mask("B", "T", lengths=("T", "T-2")),
    "encoder_hidden_states_2": randn("B", "T2", "E2"),
    "encoder_attention_mask_2": mask("B", "T2", lengths=("T2", "T2-1")),
    "image_embeds": read(randn("B", "TI", "EI")),  # without an image they are all zero
}

ROWS = (
    Family(
        key="hunyuan_video_15",
        title="HunyuanVideo 1.5",
        aliases=("HunyuanVideo 1.5 T2V",),
        class_path="diffusers.HunyuanVideo15Transformer3DModel",
        stacks=(REFINER, DOUBLE),
        tiny=Build(
            config={
                "in_channels": 9,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 8,
                "num_refiner_layers": 2,
                "mlp_ratio": 2.0,
                "text_embed_dim": 16,
                "text_embed_2_dim": 8,
                "image_embed_dim": 12,
                "rope_axes_dim": (2, 2, 4),
                "target_size": 16,
            },
            vars={"B": 2, "FR": 5, "H": 48, "W": 48, "C": 9, "T": 7, "E": 16, "T2": 4, "E2": 8, "TI": 3, "EI": 12},
            let=_LET,
            inputs=_INPUTS,
        ),
        # 480: a bucket of that pixel area; 48 frames become 12 latent frames.
        real=Build(
            config={},
            vars={
                "B": 2,
                "FR": 48,
                "H": 480,
                "W": 480,
                "C": 65,
                "T": 1000,
                "E": 3584,
                "T2": 256,
                "E2": 1472,
                "TI": 729,
                "EI": 1152,
            },
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=8_326_608_160,
        published="8.3B",
        variants={"text to video": {"image_embeds": read(zeros("B", "TI", "EI", dtype="compute"))}},
        sizes={"C": "in_channels", "E": "text_embed_dim", "E2": "text_embed_2_dim", "EI": "image_embed_dim"},
        block_classes=("HunyuanVideo15IndividualTokenRefinerBlock", "HunyuanVideo15TransformerBlock"),
    ),
)
