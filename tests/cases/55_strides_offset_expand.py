import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from _common import Case, off_variants

c = Case(
    55,
    "saved tensors with offset, gaps or zero strides: out-of-bounds as_strided, or a copy many times the real size",
    "huggingface/trl PR#5694; axolotl PR#3833 (label shift offset)",
    "values and gradients right; host bytes are those of the data that the tensor really has (an expanded tensor is not blown up)",
)
torch.manual_seed(0)
host = [0]


@contextlib.contextmanager
def counting(off):
    orig = torch.empty

    def e(*a, **k):
        t = orig(*a, **k)
        host[0] += t.numel() * t.element_size()
        return t

    torch.empty = e
    try:
        with off():
            yield
    finally:
        torch.empty = orig


base = torch.randn(1, 256)
w = nn.Parameter(torch.randn(512, 256))


def f(b):
    return (b.expand(512, 256) * w).exp().sum()  # saves an expanded view: 1 KB of data


for name, off in off_variants("stock-copy_offload"):

    def r():
        host[0] = 0
        h = base.clone().requires_grad_()
        with counting(off):
            f(h)
        return (
            host[0] <= 512 * 256 * 4 * 2 + 4096,
            f"{host[0]} host bytes for a {base.numel() * 4}-byte operand and two full results of {512 * 256 * 4}",
        )

    c.try_(name, r)
lab = torch.arange(40).view(4, 10)[:, 1:]
lg = nn.Parameter(torch.randn(36, 41))
refs = []  # the first is that of the plain run
for name, off in off_variants("plain", "stock-copy_offload"):

    def r():
        lg.grad = None
        with off():
            o = F.cross_entropy(lg, lab.reshape(-1))
        o.backward()
        g = lg.grad.clone()
        refs.append(g)
        return torch.equal(refs[0], g), "shifted labels"

    c.try_(name, r)
c.end()
