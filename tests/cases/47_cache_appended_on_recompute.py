import torch

from _common import Case, LoRALinear, ck_variants, grads, plain, same, zero

c = Case(
    47,
    "a mutable cache argument grows again on recompute (171 -> 342 tokens)",
    "pytorch/pytorch#155171",
    "detected and explained (which argument changed), or the cache is frozen/copied; never silently attention over doubled keys",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(3, 8)


def fn(h, cache):
    cache.append(l(h))
    kv = torch.cat(cache)
    return torch.softmax(h @ kv.t(), -1) @ kv


def go(ck):
    zero(l)
    ck(fn, (x * 1).requires_grad_(), []).square().mean().backward()
    return grads(l)


ref = go(plain)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):
    c.equal_or_loud(name, lambda: same(ref, go(ck)))
c.end()
