import gc
import weakref

import torch

from _common import Case, ck_variants

c = Case(
    67,
    "activations stay alive until the garbage collector runs (closure refers to its own output)",
    "pytorch/pytorch#84413",
    "after backward, or after dropping the output without backward, memory is free at once without gc.collect()",
)


def once(ck, do_backward):
    d = {"big": torch.zeros(1000)}
    w = weakref.ref(d["big"])

    def f(a, d=d):
        return a * d["big"][0]

    p = torch.randn(4, requires_grad=True)
    o = ck(f, p)
    d["o"] = o
    if do_backward:
        o.sum().backward()
    del d, o, p, f
    return w


for name, ck in ck_variants("plain", "stock-nonreentrant", "stock-reentrant", "naive-offload"):
    for bw in (True, False):

        def r():
            gc.collect()
            gc.disable()
            try:
                return once(ck, bw)() is None, f"backward={bw}"
            finally:
                gc.enable()
                gc.collect()

        c.try_(name, r)
c.end()
