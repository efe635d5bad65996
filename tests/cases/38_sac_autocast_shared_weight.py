from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import Case, grads, same, zero

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
c.end()
