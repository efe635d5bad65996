from collections import OrderedDict

import torch
from torch import nn

from _common import Case, LoRALinear, ck_variants, grads, plain, same, zero

c = Case(
    32,
    "blocks that return a tensor, a 1-tuple, a pair, a list, a dict, None among tensors",
    "axolotl-ai-cloud/axolotl PR#3412; bghira/SimpleTuner#543 ('Tensor, not tuple')",
    "the returned structure and types are exactly those of the plain call; gradients flow through every tensor of it; unused outputs are fine",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
l2 = LoRALinear(8, 8)
mods = nn.ModuleList([l, l2])
x = torch.randn(2, 8)
fns = {
    "tensor": lambda a: l(a),
    "1-tuple": lambda a: (l(a),),
    "pair": lambda a: (l(a), l2(a)),
    "list": lambda a: [l(a), l2(a)],
    "dict": lambda a: OrderedDict(h=l(a), e=l2(a)),
    "pair+None": lambda a: (l(a), None),
    "pair+int": lambda a: (l(a), 7),
    "nested": lambda a: (l(a), (l2(a), {"k": l2(a) * 2})),
    "no-grad part": lambda a: (l(a), (a > 0)),
}


def leaves(o):
    import torch.utils._pytree as P

    return [t for t in P.tree_leaves(o) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def go(ck, fn):
    zero(mods)
    h = (x * 1).requires_grad_()
    o = ck(fn, h)
    sum(t.square().mean() for t in leaves(o)).backward()
    return type(o), grads(mods)


for k, fn in fns.items():
    t0, g0 = go(plain, fn)
    for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

        def r():
            t1, g1 = go(ck, fn)
            ok, d = same(g0, g1)
            return ok and t0 is t1, f"{k}: type {t1.__name__}; {d}"

        c.try_(name, r)
c.end()
