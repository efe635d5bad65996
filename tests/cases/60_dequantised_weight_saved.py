import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from _common import Case, ck_variants, off_variants

c = Case(
    60,
    "the dequantised copy of a frozen quantised weight is kept (or offloaded) for backward",
    "bitsandbytes-foundation/bitsandbytes PR#1935; pytorch/ao#893 PR#3349; meta-pytorch/torchtune PR#693",
    "with the library's wrapper, bytes kept per layer are those of the packed weight plus the activation; the dense copy is made again in backward and is never sent to the host",
)
torch.manual_seed(0)
d = 512


class QLin(nn.Module):
    def __init__(s):
        super().__init__()
        w = torch.randn(d, d)
        s.register_buffer("s", w.abs().amax(1, keepdim=True) / 127)
        s.register_buffer("q", torch.round(w / s.s).to(torch.int8))

    def forward(s, x):
        return F.linear(x, s.q.float() * s.s)


def kept(ck, off=contextlib.nullcontext):
    m = nn.ModuleList(QLin() for _ in range(4))
    buf = {b.untyped_storage().data_ptr() for b in m.buffers()}
    big = [0]
    seen = set()

    def pack(t):
        k = t.untyped_storage().data_ptr()
        if t.numel() >= d * d and t.is_floating_point() and k not in buf and k not in seen:
            seen.add(k)
            big[0] += t.numel() * 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h = torch.randn(4, d, requires_grad=True)
        for b in m:
            h = ck(b, h)
    h.sum().backward()
    return big[0]


for name, ck in ck_variants("plain", "stock-nonreentrant"):
    c.try_(
        name, lambda: ((n := kept(ck)) == 0, f"{n} bytes of dense weights held after the forward (packed: {4 * d * d})")
    )


def dense_copied(run, off):
    """Bytes of dense weights, and of other tensors, that are copied while ``run()`` goes forward."""
    copied = {"dense weights": 0, "activations": 0}
    orig = torch.Tensor.copy_

    def spy(s, src, *a, **k):
        n = src.untyped_storage().nbytes()
        copied["dense weights" if n == d * d * 4 else "activations"] += n
        return orig(s, src, *a, **k)

    torch.Tensor.copy_ = spy
    try:
        with off():
            o = run()
    finally:
        torch.Tensor.copy_ = orig
    o.sum().backward()
    return copied


layers = nn.ModuleList(QLin() for _ in range(4))
shapes = {"2-d": (4, d), "3-d": (2, 3, d)}
for name, off in off_variants("stock-copy_offload"):
    for shape in shapes:

        def r():
            def run():
                h = torch.randn(shapes[shape], requires_grad=True) * 1
                for b in layers:
                    h = b(h).sin()
                return h

            n = dense_copied(run, off)
            return n["dense weights"] == 0 < n["activations"], f"{shape} input: bytes copied {n}"

        c.try_(name, r)
try:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    m = nn.Sequential(nn.Linear(d, d), nn.Linear(d, d)).requires_grad_(False)
    quantize_(m, Int8WeightOnlyConfig())
    for name, off in off_variants("stock-save_on_cpu", "stock-copy_offload"):

        def r():
            kinds = []
            x = torch.randn(4, d, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (kinds.append((type(t).__name__, tuple(t.shape), t.dtype)), t)[1], lambda t: t
            ):
                o = m(x)
            o.sum().backward()
            g0 = x.grad.clone()
            x.grad = None
            with off():
                o = m(x)
            o.sum().backward()
            dense = [
                k
                for k in kinds
                if len(k[1]) == 2 and k[1][0] * k[1][1] >= d * d and k[2].is_floating_point and k[0] == "Tensor"
            ]
            told = (
                f"torchao int8 weight-only: dense float weights among the saved tensors: {len(dense)} of {len(kinds)}"
            )
            if name.startswith("adapter"):  # that torchao saves them is not the adapter's doing; that they stay is
                n = dense_copied(lambda: m(x), off)
                return torch.allclose(g0, x.grad) and n["dense weights"] == 0, f"{told}; bytes copied {n}"
            return torch.allclose(g0, x.grad) and not dense, told

        c.try_(name + " torchao", r)
except Exception as e:
    c.note(f"torchao part not run: {type(e).__name__}: {str(e)[:120]}")
c.end()
