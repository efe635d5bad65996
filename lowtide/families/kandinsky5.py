"""Kandinsky 5: one class; Image Lite 6B and Video Lite 2B. Latents are channels-last.

The text blocks' last output reaches every visual block as a constant argument.
"""

from lowtide.families.inputs import count, fixed, rand, randn
from lowtide.families.row import Build, Family, Stack

_CLASS = "diffusers.Kandinsky5Transformer3DModel"
_STACKS = (
    Stack(
        name="text_transformer_blocks",
        blocks=("text_transformer_blocks.*",),
        feed_forward=(("feed_forward",),),
        attention=("self_attention",),
        attention_norms=("self_attention_norm",),
    ),
    Stack(
        name="visual_transformer_blocks",
        blocks=("visual_transformer_blocks.*",),
        feed_forward=(("feed_forward",),),
        attention=("self_attention", "cross_attention"),
        attention_norms=("self_attention_norm", "cross_attention_norm"),
    ),
)
_LET = {"F": "(FR-1)//4+1", "h": "H//8", "w": "W//8"}
_INPUTS = {
    "hidden_states": randn("B", "F", "h", "w", "C"),
    "encoder_hidden_states": randn("B", "T", "E"),
    "timestep": rand("B", scale=1000.0),
    "pooled_projections": randn("B", "P"),
    "visual_rope_pos": [count("F"), count("h//2"), count("w//2")],
    "text_rope_pos": count("T"),
}
_VIDEO_INPUTS = _INPUTS | {"scale_factor": fixed(1.0, 2.0, 2.0)}
_TINY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": 16,
    "ff_dim": 32,
    "num_text_blocks": 2,
    "num_visual_blocks": 8,
    "axes_dims": (4, 2, 2),
}
_REAL = {"in_visual_dim": 16, "out_visual_dim": 16}
_SIZES = {
    "C": "in_visual_dim*(1+visual_cond)+visual_cond",  # with condition latents and their mask
    "E": "in_text_dim",
    "P": "in_text_dim2",
}
_BLOCK_CLASSES = ("Kandinsky5TransformerEncoderBlock", "Kandinsky5TransformerDecoderBlock")

ROWS = (
    Family(
        key="kandinsky5_image",
        title="Kandinsky 5 Image",
        aliases=("Kandinsky 5 Image 6B", "Kandinsky 5.0 Image Lite", "Kandinsky 5 T2I"),
        class_path=_CLASS,
        stacks=_STACKS,
        tiny=Build(
            config=_TINY,
            vars={"B": 2, "FR": 1, "H": 48, "W": 48, "C": 4, "T": 5, "E": 16, "P": 8},
            let=_LET,
            inputs=_INPUTS,
        ),
        real=Build(
            config=_REAL | {"model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)},
            vars={"B": 3, "FR": 1, "H": 1024, "W": 1024, "C": 16, "T": 256, "E": 3584, "P": 768},
            let=_LET,
            inputs=_INPUTS,
        ),
        parameters=6_022_080_576,
        published="6B",
        sizes=_SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
    Family(
        key="kandinsky5_video",
        title="Kandinsky 5 Video",
        aliases=("Kandinsky 5 Video 2B", "Kandinsky 5.0 Video Lite", "Kandinsky 5 T2V"),
        class_path=_CLASS,
        stacks=_STACKS,
        tiny=Build(
            config=_TINY | {"visual_cond": True},
            vars={"B": 1, "FR": 9, "H": 32, "W": 32, "C": 9, "T": 5, "E": 16, "P": 8},
            let=_LET,
            inputs=_VIDEO_INPUTS,
        ),
        real=Build(
            config=_REAL | {"model_dim": 1792, "ff_dim": 7168, "visual_cond": True},
            vars={"B": 2, "FR": 81, "H": 512, "W": 768, "C": 33, "T": 256, "E": 3584, "P": 768},
            let=_LET,
            inputs=_VIDEO_INPUTS,
        ),
        parameters=2_007_702_848,
        published="2B (Lite; Pro has 19B)",
        sizes=_SIZES,
        block_classes=_BLOCK_CLASSES,
    ),
)
