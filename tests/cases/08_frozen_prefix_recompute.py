import torch
from torch import nn

from _common import Block, Case, ck_variants

c = Case(
    8,
    "blocks that need no gradient are still recomputed, or their output is marked as needing grad",
    "facebookresearch/fairscale PR#787; OpenBMB/BMTrain PR#8",
    "no recompute and no saved copy for a region where nothing needs grad; its output keeps requires_grad=False",
)
torch.manual_seed(0)
calls = [0]


class Cnt(Block):
    def forward(s, x):
        calls[0] += 1
        return super().forward(x)


frozen = nn.ModuleList(Cnt().requires_grad_(False) for _ in range(4))
train = Cnt()
x = torch.randn(2, 8, 32)
for name, ck in ck_variants("plain", "stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def run():
        calls[0] = 0
        h = x
        for b in frozen:
            h = ck(b, h)
        flag = h.requires_grad
        ck(train, h).mean().backward()
        best = 5 if name == "plain" else 6
        return calls[
            0
        ] == best and not flag, f"{calls[0]} block calls (best {best}); frozen output requires_grad={flag}"

    c.try_(name, run)
c.end()
