import torch
from torch import nn

from _common import Case, LoRALinear, ck_variants, grads, reentrant, same, zero

c = Case(
    4,
    "forcing requires_grad on the block input breaks a block that edits its input in place",
    "huggingface/transformers PR#35898; hpcaitech/ColossalAI PR#1460",
    "works: the library must not turn user inputs into leaves that need grad; gradients equal the plain run",
)


class InPlace(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = LoRALinear(16, 16)

    def forward(s, x):
        x.mul_(0.5)  # first operation edits the argument
        return s.l(x)


torch.manual_seed(0)
m = InPlace()
pre = nn.Linear(16, 16).requires_grad_(False)
x0 = torch.randn(4, 16)
zero(m)
m(pre(x0)).square().mean().backward()
ref = grads(m)


def forced(fn, x):
    x = x.detach().requires_grad_()
    return reentrant(fn, x)


for name, ck in [
    *ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"),
    ("stock-forced-input-grad", forced),
]:

    def run():
        zero(m)
        try:
            ck(m, pre(x0)).square().mean().backward()
        except RuntimeError as e:
            return "modified by an inplace" in str(e), "loud error: " + str(e)[:90]
        return same(ref, grads(m))

    c.try_(name, run)
c.note(
    "non-reentrant detects the edit of a saved input at recompute time (version counter): an error is acceptable, a wrong number is not"
)
c.end()
