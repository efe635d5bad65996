import torch
from torch import nn

from _common import Case, LoRALinear, ck_variants, grads, plain, same, zero

c = Case(
    48,
    "MoE router picks other experts on recompute when scores are near ties: expert batches change size",
    "pytorch/torchtitan#1117; NVIDIA-NeMo/Automodel PR#2635 PR#3156",
    "routing decisions of the forward are kept (saved, tiny) and replayed on recompute; or MoE blocks are refused with a reason",
)
torch.manual_seed(0)
E = nn.ModuleList(LoRALinear(8, 8) for _ in range(2))
gate = nn.Linear(8, 2)
k = [0]
mods = nn.ModuleList([E, gate])
x = torch.randn(16, 8)


def moe(h):
    k[0] += 1
    s = gate(h) * 1e-6 + (1e-9 if k[0] % 2 else -1e-9) * torch.arange(16)[:, None] * torch.tensor(
        [1.0, -1.0]
    )  # kernel noise on tied scores
    s = s + torch.tensor([0.0, 0.0])
    idx = (torch.sign(s[:, 0] - s[:, 1]) > 0).long() if False else s.argmax(-1)
    noise = torch.tensor([0, 1]) if k[0] % 2 else torch.tensor([1, 0])
    idx[0] = noise[0]  # one token flips
    out = torch.zeros_like(h)
    for e in (0, 1):
        sel = idx == e
        out = out.index_add(0, sel.nonzero()[:, 0], E[e](h[sel]))
    return out * torch.softmax(s, -1).max(-1, keepdim=True).values


def go(ck):
    k[0] = 0
    zero(mods)
    ck(moe, (x * 1).requires_grad_()).square().mean().backward()
    return grads(mods)


ref = go(plain)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):
    c.equal_or_loud(name, lambda: same(ref, go(ck)))
c.end()
