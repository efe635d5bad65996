import torch

from _common import Block, Case, ck_variants, grads, same, zero

c = Case(
    1,
    "frozen base + LoRA: the first block's input needs no gradient",
    "kohya-ss/sd-scripts#697 #91; cloneofsimo/lora#26; microsoft/LoRA#120; huggingface/peft#1142; hiyouga/LlamaFactory#1338",
    "every LoRA parameter gets the same gradient as without checkpointing, with no enable_input_require_grads trick",
)
torch.manual_seed(0)
m = Block()
x = torch.randn(2, 8, 32)
zero(m)
m(x).square().mean().backward()
ref = grads(m)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def run():
        zero(m)
        out = ck(m, x)
        out.square().mean().backward()
        return same(ref, grads(m))

    c.try_(name, run)
c.end()
