from dataclasses import dataclass

import torch
from diffusers.utils import BaseOutput

from _common import Case, LoRALinear, ck_variants, grads, same, zero

c = Case(
    33,
    "a block that returns a dataclass / BaseOutput loses its gradient",
    "pytorch/pytorch#124725",
    "gradients flow, or a clear error; never an output without grad_fn",
)


@dataclass
class Plain:
    h: torch.Tensor
    aux: object = None


@dataclass
class Out(BaseOutput):
    h: torch.Tensor = None


torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(2, 8)
for kind in (Plain, Out):
    zero(l)
    kind(h=l(x)).h.mean().backward()
    ref = grads(l)
    for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

        def r():
            zero(l)
            o = ck(lambda a: kind(h=l(a)), (x * 1).requires_grad_())
            o.h.mean().backward()
            ok, d = same(ref, grads(l))
            return ok, f"{kind.__name__}: {d}"

        c.try_(name, r)
c.end()
