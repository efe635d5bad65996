import contextlib

import torch

from _common import Case, LoRALinear, ck_variants, grads, off_variants, plain, same, zero

c = Case(
    80,
    "a custom Function reads ctx.saved_tensors twice in its backward (some fused kernels do)",
    "pytorch/pytorch#82156 #103726; allenai/OLMo PR#639",
    "works (the offload unpack is repeatable; a checkpointed region either works or gives the stock error that explains it)",
)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return torch.sin(a)

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        (b,) = ctx.saved_tensors
        return g * torch.cos((a + b) / 2)


torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(4, 8)


def go(ck, off=contextlib.nullcontext):
    zero(l)
    with off():
        o = ck(lambda h: Twice.apply(l(h)), (x * 1).requires_grad_())
    o.sum().backward()
    return grads(l)


ref = go(plain)
for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):
    c.try_(name, lambda: same(ref, go(ck)))


class Tracker:
    def __init__(s):
        s.t = {}
        s.i = 0

    @contextlib.contextmanager
    def __call__(s):
        def pack(t):
            s.i += 1
            s.t[s.i] = t.clone()
            return s.i

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: s.t.pop(i)):
            yield


for name, off in [*off_variants("stock-copy_offload"), ("naive-pop-once", Tracker())]:
    c.try_(name, lambda: same(ref, go(plain, off)))


def peek(off):
    with off():
        o = torch.sin((x * 1).requires_grad_() * 2)
    _ = o.grad_fn._saved_self
    _ = o.grad_fn._saved_self
    o.sum().backward()
    return True, "debugger reads grad_fn._saved_self"


for name, off in [*off_variants("stock-copy_offload"), ("naive-pop-once", Tracker())]:
    c.try_(name + " peek", lambda: peek(off))
c.end()
