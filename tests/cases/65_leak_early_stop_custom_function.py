import gc

import torch

from _common import Case, ck_variants

c = Case(
    65,
    "memory grows each step: custom autograd Function last in a checkpointed region + early stop",
    "pytorch/pytorch#161186",
    "no live tensor is left after backward (weakrefs die without gc)",
)


class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        o0, o1 = torch.zeros(1000), torch.ones(1000)
        ctx.save_for_backward(a, o0, o1)
        return o0 + a.sum(), o1

    @staticmethod
    def backward(ctx, g0, g1):
        _ = ctx.saved_tensors
        return torch.ones(4) * g0.sum()


def live():
    return sum(isinstance(o, torch.Tensor) and o.numel() == 1000 for o in gc.get_objects())


for name, ck in ck_variants("plain", "stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def r():
        gc.collect()
        gc.disable()
        try:
            b0 = live()
            for _ in range(5):
                p = torch.randn(4, requires_grad=True)
                ck(lambda a: Op.apply(a)[0], p).sum().backward()
                del p
            n = live() - b0
        finally:
            gc.enable()
        return n <= 1, f"{n} big tensors alive after 5 steps without gc"

    c.try_(name, r)
c.end()
