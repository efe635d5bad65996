import torch

from _common import Case, LoRALinear, ck_variants, grads, plain, same, zero

c = Case(
    41,
    "default device / default dtype set in the forward is not the one seen on recompute",
    "pytorch/pytorch#124788 PR#172802; tdrussell/diffusion-pipe#402 (float64 rope)",
    "recompute sees the same default dtype and device context as the forward, or the mismatch is reported in words",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(4, 8)


def fn(h):
    return l(h) * torch.ones(8).to(torch.get_default_dtype()).cos()  # tables built inside the block


def go(ck):
    zero(l)
    torch.set_default_dtype(torch.float64)
    try:
        o = ck(fn, (x * 1).requires_grad_())
    finally:
        torch.set_default_dtype(torch.float32)
    o.square().mean().backward()
    return grads(l)


ref = go(plain)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):
    c.equal_or_loud(name, lambda: same(ref, go(ck)))


def fn2(h):
    return l(h) * torch.ones(8)


def go2(ck):
    zero(l)
    with torch.device("cpu"):
        o = ck(fn2, (x * 1).requires_grad_())
    with torch.device("meta"):
        o.square().mean().backward()  # another device context is active in backward
    return grads(l)


ref = go2(plain)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):
    c.equal_or_loud(name + " device ctx", lambda: same(ref, go2(ck)))
c.end()
