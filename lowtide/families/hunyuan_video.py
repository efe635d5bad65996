"""HunyuanVideo 1.0: text refiner, double and single blocks. All stacks hand on the very same tensors."""

from lowtide.families.inputs import full, mask, ones, rand, randn, when
from lowtide.families.joint_streams import DOUBLE, SINGLE
from lowtide.families.row import Build, Family, Stack

_LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "C", "F", "h", "w"),
    "timestep": rand("B", scale=1000.0),
    "encoder_hidden_states": randn("B", "T", "E"),
    "pooled_projections": randn("B", "P"),
    "guidance": when("G", full(6000.0, "B")),
    "encoder_attention_mask": ones("B", "T"),
}
REFINER = Stack(
    name="context_embedder.token_refiner.refiner_blocks",
    blocks=("context_embedder.token_refiner.refiner_blocks.*",),
    feed_forward=(("norm2", "ff"),),
    attention=("attn",),
    attention_norms=("norm1",),
)

ROWS = (
    Family(
        key="hunyuan_video",
        title="HunyuanVideo 1.0",
        aliases=("HunyuanVideo T2V",),
        class_path="diffusers.HunyuanVideoTransformer3DModel",
        stacks=(REFINER, DOUBLE, SINGLE),
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
                "text_embed_dim": 16,
                "pooled_projection_dim": 8,
                "rope_axes_dim": (2, 2, 4),
            },
            vars={"B": 2, "FR": 5, "H": 32, "W": 32, "C": 4, "T": 7, "E": 16, "P": 8, "G": 1},
            let=_LET,
            inputs=_INPUTS | {"encoder_attention_mask": mask("B", "T", lengths=("T", "T-2"))},
        ),
        real=Build(
            config={},
            vars={"B": 1, "FR": 61, "H": 544, "W": 960, "C": 16, "T": 256, "E": 4096, "P": 768, "G": 1},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=12_821_012_544,
        published="13B",
        sizes={"C": "in_channels", "E": "text_embed_dim", "P": "pooled_projection_dim", "G": "guidance_embeds"},
        block_classes=(
            "HunyuanVideoIndividualTokenRefinerBlock",
            "HunyuanVideoTransformerBlock",
            "HunyuanVideoSingleTransformerBlock",
        ),
    ),
)
