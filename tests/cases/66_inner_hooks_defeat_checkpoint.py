import torch

from _common import Block, Case, ck_variants, grads, off_variants, same, zero

c = Case(
    66,
    "saved-tensor hooks used inside a checkpointed region (offload inside checkpoint, or to 'switch it off' locally)",
    "pytorch/pytorch#115255; meta-pytorch/torchtune#1867 #1936 (offload + checkpoint together)",
    "offload inside or outside a checkpointed region: right gradients, nothing kept twice, nothing left after backward",
)

torch.manual_seed(0)
m = Block()
x = torch.randn(2, 8, 32)
m(x).square().mean().backward()
ref = grads(m)
for oname, off in off_variants("stock-copy_offload"):
    for cname, ck in ck_variants("stock-nonreentrant", "naive-offload"):
        for order in ("offload outside", "offload inside"):

            def r():
                zero(m)
                h = (x * 1).requires_grad_()
                if order == "offload outside":
                    with off():
                        o = ck(m, h)
                else:

                    def inner(z):
                        with off():
                            return m(z)

                    o = ck(inner, h)
                o.square().mean().backward()
                return same(ref, grads(m))

            c.try_(f"{oname[:18]}+{cname[6:20]}", lambda: (lambda t: (t[0], order + ": " + t[1]))(r()))
c.end()
