"""HunyuanImage 2.1: a text refiner, then blocks as in HunyuanVideo."""

from lowtide.families.inputs import mask, ones, rand, randn
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family, Stack

_LET = {"h": "H//32", "w": "W//32"}
_INPUTS = {
    "hidden_states": randn("B", "C", "h", "w"),
    "timestep": rand("B", scale=1000.0),
    "encoder_hidden_states": randn("B", "T", "E"),
    "encoder_attention_mask": ones("B", "T"),
}

ROWS = (
    Family(
        key="hunyuan_image",
        title="HunyuanImage 2.1",
        aliases=("HunyuanImage", "Hunyuan Image 2.1"),
        class_path="diffusers.HunyuanImageTransformer2DModel",
        stacks=(
            Stack(
                name="context_embedder.token_refiner.refiner_blocks",
                blocks=("context_embedder.token_refiner.refiner_blocks.*",),
                feed_forward=(("norm2", "ff"),),
                attention=("attn",),
                attention_norms=("norm1",),
            ),
            DOUBLE,
            SINGLE,
        ),
        tiny=Build(
            config={
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 6,
                "num_single_layers": 8,
                "num_refiner_layers": 2,
                "mlp_ratio": 2.0,
                "patch_size": (1, 1),
                "text_embed_dim": 16,
                "rope_axes_dim": (4, 4),
            },
            vars={"B": 2, "H": 128, "W": 128, "C": 4, "T": 7, "E": 16},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={"text_embed_2_dim": 1472},
            vars={"B": 1, "H": 2048, "W": 2048, "C": 64, "T": 1000, "E": 3584},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=17_425_795_520,
        published="17B (rounded)",
        sizes={"C": "in_channels", "E": "text_embed_dim"},
        block_classes=(
            "HunyuanImageIndividualTokenRefinerBlock",
            "HunyuanImageTransformerBlock",
            "HunyuanImageSingleTransformerBlock",
        ),
    ),
)
