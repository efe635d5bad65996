import torch
from torch import nn

from _common import Case, LoRALinear, off_variants

c = Case(
    58,
    "saved-tensor offload also moves the (frozen) weights, every step",
    "meta-llama/llama-cookbook PR#115; NVIDIA/TransformerEngine PR#571 PR#1762",
    "parameters, buffers and views of them (weight.t()) never leave the device and are not counted; only activations are moved",
)
torch.manual_seed(0)
d = 256
m = nn.Sequential(*[LoRALinear(d, d) for _ in range(4)])
x = torch.randn(8, d)
par = {p.untyped_storage().data_ptr() for p in m.parameters()}


def moved(off):
    st = {"weights": 0, "activations": 0}
    orig = torch.Tensor.copy_

    def spy(s, src, *a, **k):
        st["weights" if src.untyped_storage().data_ptr() in par else "activations"] += src.numel() * src.element_size()
        return orig(s, src, *a, **k)

    torch.Tensor.copy_ = spy
    try:
        with off():
            o = m((x * 1).requires_grad_())
    finally:
        torch.Tensor.copy_ = orig
    o.sum().backward()
    return st


for name, off in off_variants("stock-copy_offload"):
    c.try_(name, lambda: ((s := moved(off))["weights"] == 0 < s["activations"], f"bytes moved {s}"))
c.end()
