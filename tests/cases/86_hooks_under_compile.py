import torch
from torch import nn

from _common import Case, off_variants, same, zero

c = Case(
    86,
    "saved-tensor offload around a compiled module: hooks run at trace time, twice, or not at all",
    "pytorch/pytorch#116221 #113263 #130972; meta-pytorch/torchtune#2456",
    "same gradients as eager, activations really moved, no recompile per step; or the library says that the pair is not supported",
)
torch._dynamo.reset()
torch.manual_seed(0)
l = nn.Linear(64, 64)
x = torch.randn(8, 64)


def f(h):
    return torch.sin(l(h)).exp()


zero(l)
h = (x * 1).requires_grad_()
f(h).sum().backward()
ref = {"w": l.weight.grad.clone(), "x": h.grad.clone()}
for backend in ("eager", "aot_eager", "inductor"):
    for name, off in off_variants("stock-save_on_cpu", "stock-copy_offload"):

        def r():
            torch._dynamo.reset()
            g = torch.compile(f, backend=backend)
            n = [0]
            orig = torch.Tensor.copy_

            def spy(s, *a, **k):
                n[0] += 1
                return orig(s, *a, **k)

            out = None
            for _ in range(2):
                zero(l)
                h = (x * 1).requires_grad_()
                torch.Tensor.copy_ = spy
                try:
                    with off():
                        o = g(h)
                finally:
                    torch.Tensor.copy_ = orig
                o.sum().backward()
                out = same(ref, {"w": l.weight.grad, "x": h.grad}, 1e-4)
            moved = n[0] > 0 or not name.startswith("adapter")
            return out[0] and moved, f"{backend}: {out[1]}; copies seen {n[0]}"

        c.try_(name, r)
c.end()
