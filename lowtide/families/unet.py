"""What families of diffusers' conditional U-Net share.

Their blocks are the micro-blocks (ResNet and transformer), one stack in call order. Between micro-blocks the model
concatenates skip tensors, reshapes and samples up or down.
"""

from lowtide.families.row import Stack

CLASS = "diffusers.UNet2DConditionModel"
STACKS = (
    Stack(
        name="micro_blocks",
        blocks=(
            "down_blocks.*.{resnets.#|attentions.#.transformer_blocks.*}",
            "mid_block.{resnets.#|attentions.#.transformer_blocks.*}",
            "up_blocks.*.{resnets.#|attentions.#.transformer_blocks.*}",
        ),
        feed_forward=(("norm3", "ff"),),
        attention=("attn1", "attn2"),
        attention_norms=("norm1", "norm2"),
    ),
)
BLOCK_CLASSES = ("ResnetBlock2D", "BasicTransformerBlock")
LET = {"h": "H//8", "w": "W//8"}
