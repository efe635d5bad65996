from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import ADAPTER, Case

c = Case(
    28,
    "a selective-checkpoint op list with aten.mm instead of aten.mm.default matches nothing",
    "pytorch/pytorch#176065",
    "the library accepts both spellings, or raises on an entry that can never match",
)
lin = nn.Linear(16, 16)
x = torch.randn(4, 16, requires_grad=True)
mm = [0]
from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    def __torch_dispatch__(s, f, t, a=(), k=None):
        mm[0] += "mm" in str(f)
        return f(*a, **(k or {}))


def run(ops):
    mm[0] = 0
    out = tck(
        lambda z: torch.sin(lin(z)),
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, ops),
    )
    with Count():
        out.sum().backward()
    return mm[0]


ops_bad, ops_ok = [torch.ops.aten.addmm], [torch.ops.aten.addmm.default]
try:
    b = run(ops_bad)
    c.row("stock packet list", False, f"{b} matmuls in backward, no error")
except Exception as e:
    c.row("stock packet list", True, f"{type(e).__name__}: {str(e)[:110]}")
c.row("stock .default list", True, f"{run(ops_ok)} matmuls in backward (2 = no recompute)")
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    # no op list at all: what is kept has one name, and a count of kernels shows that it really is kept
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, z):
            q, k, v = self.qkv(z).view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, z):
            return z + self.attn(z).sin()

    kernels = [0]

    class CountKernels(TorchDispatchMode):
        def __torch_dispatch__(s, f, t, a=(), k=None):
            kernels[0] += "scaled_dot_product" in str(f) and "backward" not in str(f)
            return f(*a, **(k or {}))

    def kernels_run(backend):
        model = nn.Module()
        model.blocks = nn.ModuleList(Layer() for _ in range(3))
        ADAPTER.enable(model, backend=backend)
        kernels[0] = 0
        with CountKernels():
            h = x
            for b in model.blocks:
                h = b(h)
            h.sum().backward()
        recomputed = ADAPTER.stats()["recompute_calls"]
        ADAPTER.disable(model)
        return kernels[0], recomputed

    for backend, want in (("torch", 6), ("torch-selective", 3), ("unsloth-selective", 3)):

        def r():
            n, recomputed = kernels_run(backend)
            return n == want and recomputed == 3, f"{n} attention kernels in 3 blocks, {recomputed} blocks recomputed"

        c.try_(f"adapter {backend}", r)
    c.raises("adapter wrong word", lambda: kernels_run("torch-sdpa"), ValueError, "torch-selective")
c.end()
