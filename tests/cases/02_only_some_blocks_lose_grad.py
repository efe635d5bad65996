import torch
from torch import nn

from _common import Block, Case, ck_variants, grads, plain, same, zero

c = Case(
    2,
    "training runs, loss falls, but the first block is never trained",
    "pytorch/pytorch#33962; huggingface/diffusers PR#3404",
    "all blocks get gradients; never a silent None because a later, unfrozen block hides the loss of the first one",
)
torch.manual_seed(0)
m = nn.ModuleList(Block() for _ in range(3))
x = torch.randn(2, 8, 32)


def fwd(ck):
    h = x
    for i, b in enumerate(m):
        h = ck(b, h) if i < 2 else b(h)
    return h.square().mean()


zero(m)
fwd(plain).backward()
ref = grads(m)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def run():
        zero(m)
        fwd(ck).backward()
        return same(ref, grads(m))

    c.try_(name, run)
c.end()
