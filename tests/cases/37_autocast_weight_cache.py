import torch
from torch import nn

from _common import Case, ck_variants, grads, plain, same, zero

c = Case(
    37,
    "autocast keeps a cast copy of a weight: the forward saves one tensor fewer than the recompute",
    "pytorch/pytorch#141896; related #193338",
    "works: a weight used under autocast outside (or under no_grad) before the checkpointed block must not break the recompute; gradients equal the plain run",
)
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(16, 16)
        s.k = nn.Linear(16, 16)

    def forward(s, x):
        return s.k(torch.relu(s.l(x)))


m = M()
x = torch.randn(4, 16)


def go(ck, how):
    zero(m)
    with torch.autocast("cpu", torch.bfloat16):
        if how == "no_grad first":
            with torch.no_grad():
                m(x)
        elif how == "grad first":
            a = m(x)
        elif how == "twice":
            a = ck(m, x)
        out = ck(m, x)
        if how in ("grad first", "twice"):
            out = out + a
    out.float().square().mean().backward()
    return grads(m)


for how in ("alone", "no_grad first", "grad first", "twice"):
    try:
        ref = go(plain, how)
    except Exception as e:
        c.note(f"plain {how}: {e}")
        continue
    if any(v is None for v in ref.values()):
        c.note(f"plain run itself has None gradients for '{how}': the cached cast has no graph")
    for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

        def r():
            ok, d = same(ref, go(ck, how), 2e-2)
            return ok, f"{how}: {d}"

        c.try_(name, r)
c.end()
