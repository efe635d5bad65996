from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import ADAPTER, Case, grads, same, zero

c = Case(
    38,
    "two selective-checkpoint regions share a weight under autocast",
    "pytorch/pytorch#193338",
    "works, same gradients as plain",
)
torch.manual_seed(0)
l = nn.Linear(16, 16)
x = torch.randn(4, 16)
ctx = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten._to_copy.default])


def go(sac):
    zero(l)
    with torch.autocast("cpu", torch.bfloat16):
        f = lambda h: torch.sin(l(h))
        a = tck(f, x, use_reentrant=False, context_fn=ctx) if sac else f(x)
        b = tck(f, x * 2, use_reentrant=False, context_fn=ctx) if sac else f(x * 2)
    (a + b).float().square().mean().backward()
    return grads(l)


ref = go(False)
c.try_("stock SAC", lambda: same(ref, go(True), 2e-2))
if ADAPTER is not None and hasattr(ADAPTER, "enable"):

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.own = l, nn.Linear(16, 16)

        def forward(self, h):
            q = self.shared(h).view(1, 4, 2, 8).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos()).transpose(1, 2).reshape(4, 16)
            return self.shared(self.own(y))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, h):
            return h + self.attn(h)

    model = nn.Module()
    model.blocks = nn.ModuleList([Layer(), Layer()])

    def step():
        zero(model)
        with torch.autocast("cpu", torch.bfloat16):
            h = x
            for b in model.blocks:
                h = b(h)
        h.float().square().mean().backward()
        return grads(model)

    expected = step()
    for backend in ("torch-selective", "unsloth-selective"):
        for interval in (1, 2):

            def r():
                ADAPTER.enable(model, backend=backend, interval=interval)
                try:
                    ok, d = same(expected, step(), 0)
                    return ok and ADAPTER.stats()["recompute_calls"] == 2, d
                finally:
                    ADAPTER.disable(model)

            c.try_(f"adapter {backend} {interval}", r)
c.end()
