import torch

from _common import Case, LoRALinear, ck_variants, zero

c = Case(
    45,
    "recompute has the same shapes but other values; the stock check sees shape, dtype and device only",
    "Comfy-Org/ComfyUI#15846; pytorch PR#192845 (compiled recompute not bit-equal)",
    "a debug/verify mode compares values (checksum of the block output) and names the block; at least documented",
)
torch.manual_seed(0)
l = LoRALinear(8, 8)
x = torch.randn(4, 8)
k = [0]


def fn(h):
    k[0] += 1
    return torch.sin(l(h) * (1.0 if k[0] % 2 else 1.2))  # stands in for a weight that came back different


for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

    def r():
        k[0] = 0
        zero(l)
        ck(fn, (x * 1).requires_grad_()).mean().backward()
        return False, "no error: wrong gradient accepted"

    try:
        ok, d = r()
        c.row(name, ok, d)
    except Exception as e:
        c.row(name, "differ" in str(e).lower() or "mismatch" in str(e).lower(), f"{type(e).__name__}: {str(e)[:100]}")
c.end()
