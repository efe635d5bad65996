"""The two kinds of block that models of Flux's kind share: double-stream, then single-stream with an inline MLP."""

from lowtide.families.row import Stack

DOUBLE = Stack(
    name="transformer_blocks",
    blocks=("transformer_blocks.*",),
    feed_forward=(("ff",), ("ff_context",)),
    attention=("attn",),
    attention_norms=("norm1", "norm1_context"),
)
SINGLE = Stack(
    name="single_transformer_blocks",
    blocks=("single_transformer_blocks.*",),
    feed_forward=(("proj_mlp", "act_mlp", "proj_out"),),
    attention=("attn",),
    attention_norms=("norm",),
)
