import torch

from _common import Block, Case, ck_variants, grads, plain, same, zero

c = Case(
    39,
    "recompute runs with another autocast dtype, or with none",
    "facebookresearch/fairscale#1199; NVIDIA/TransformerEngine#787",
    "recompute uses the forward's autocast state (device, enabled, dtype, cache) although backward runs outside the context, nested contexts included",
)
torch.manual_seed(0)
m = Block()
x = torch.randn(2, 8, 32)
dts = []
m.n1.register_forward_hook(lambda *_: dts.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))))


def go(ck, nested):
    zero(m)
    dts.clear()
    h = (x * 1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        if nested:
            with torch.autocast("cpu", enabled=False):
                o = ck(m, h)
        else:
            o = ck(m, h)
    o.float().square().mean().backward()
    return grads(m)


for nested in (False, True):
    ref = go(plain, nested)
    for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

        def r():
            g = go(ck, nested)
            ok, d = same(ref, g, 5e-3)
            return ok and len(set(dts)) == 1, f"nested-off={nested}: states { {str(i) for i in dts} }; {d}"

        c.try_(name, r)
c.end()
