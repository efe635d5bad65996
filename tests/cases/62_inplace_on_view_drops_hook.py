import torch

from _common import Case, LoRALinear, ck_variants, grads, plain, same, zero

c = Case(
    62,
    "an in-place op on a view of a block's output drops the hook that a library put on that output",
    "pytorch/pytorch#181832 (FSDP2 pre-backward hook lost)",
    "prefetch/unshard that hangs on output hooks still happens (or falls back to loading on demand); gradients right",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(1, 4, 8)
for inplace in (False, True):
    fired = [0]
    zero(l)
    o = l(x)
    o.register_hook(lambda g: fired.__setitem__(0, fired[0] + 1))
    v = o.squeeze(0)
    if inplace:
        v += 1.0
    else:
        v = v + 1.0
    v.square().sum().backward()
    c.row(f"stock tensor hook inplace={inplace}", fired[0] == 1, f"hook fired {fired[0]} times")
    fired = [0]
    zero(l)
    o = l(x)
    h = torch.autograd.graph.register_multi_grad_hook((o,), lambda g: fired.__setitem__(0, fired[0] + 1))
    v = o.squeeze(0)
    if inplace:
        v += 1.0
    else:
        v = v + 1.0
    v.square().sum().backward()
    c.row(f"stock multi-grad hook inplace={inplace}", fired[0] == 1, f"fired {fired[0]}")
pre = torch.randn(1, 4, 8)


def go(ck, ip):
    zero(l)
    o = ck(l, pre)
    v = o.squeeze(0)
    if ip:
        v += 1.0
    else:
        v = v + 1.0
    o2 = ck(torch.sin, v)
    o2.square().sum().backward()
    return grads(l)


ref = go(plain, False)
for name, ck in ck_variants("stock-nonreentrant", "naive-offload"):
    c.try_(name + " inplace", lambda: same(ref, go(ck, True)))
c.end()
