import torch

from _common import Case, LoRALinear, ck_variants, grads, same, zero

c = Case(
    46,
    "another implementation (compiled -> eager, flash -> math) is used on recompute: different number of saved tensors",
    "unslothai/unsloth-zoo PR#1001 #1146",
    "the error tells which block and what differs and how to fix it; a block-input backend (no positional matching) simply works",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(4, 8)
k = [0]


def fn(h):
    k[0] += 1
    y = l(h)
    return torch.nn.functional.gelu(y) if k[0] % 2 else 0.5 * y * (1 + torch.erf(y / 2**0.5))


zero(l)
torch.nn.functional.gelu(l(x)).mean().backward()
ref = grads(l)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def r():
        k[0] = 0
        zero(l)
        ck(fn, (x * 1).requires_grad_()).mean().backward()
        return same(ref, grads(l), 1e-4)

    c.equal_or_loud(name, r)
c.end()
