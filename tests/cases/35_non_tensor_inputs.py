import torch

from _common import Case, LoRALinear, ck_variants, grads, same, zero

c = Case(
    35,
    "non-tensor inputs and objects that hold tensors (block masks, rope tuples, None, str, bool)",
    "pytorch/pytorch PR#52422 (#52415); meta-pytorch/attention-gym#53",
    "all pass through unchanged by identity; the block sees the same types on recompute as in the forward",
)


class Mask:
    def __init__(s, m):
        s.m = m


torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(2, 8)
seen = []


def fn(h, mask, rope, flag, name, none):
    seen.append((type(mask).__name__, type(rope).__name__, flag, name, none))
    assert none is None and isinstance(flag, bool)
    return l(h) * mask.m * rope[0] + rope[1]


args = (Mask(torch.ones(2, 8)), (torch.ones(8), torch.zeros(8)), True, "joint", None)
zero(l)
fn(x, *args).mean().backward()
ref = grads(l)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def r():
        seen.clear()
        zero(l)
        ck(fn, (x * 1).requires_grad_(), *args).mean().backward()
        ok, d = same(ref, grads(l))
        return ok and len(set(seen)) == 1, d

    c.try_(name, r)
c.end()
