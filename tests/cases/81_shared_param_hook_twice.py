import torch
from torch import nn

from _common import Case, ck_variants

c = Case(
    81,
    "a weight shared by two checkpointed blocks: its gradient hook runs more than once, so optimizer-in-backward steps twice on partial gradients",
    "pytorch/pytorch#81296",
    "post-accumulate hook runs once per backward with the full gradient",
)
torch.manual_seed(0)
a, b = nn.Linear(8, 8), nn.Linear(8, 8)
b.weight = a.weight
x = torch.randn(4, 8)
refs = []  # the first is that of the plain run
for name, ck in ck_variants("plain", "stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def r():
        n = [0]
        a.zero_grad()
        b.zero_grad()
        h = a.weight.register_post_accumulate_grad_hook(lambda p: n.__setitem__(0, n[0] + 1))
        try:
            y = (x * 1).requires_grad_()
            ck(b, torch.relu(ck(a, y))).square().sum().backward()
        finally:
            h.remove()
        g = a.weight.grad.clone()
        refs.append(g)
        return n[0] == 1 and torch.allclose(
            refs[0], g
        ), f"hook ran {n[0]} times; gradient right: {torch.allclose(refs[0], g)}"

    c.try_(name, r)
c.end()
