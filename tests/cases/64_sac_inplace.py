from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import Case, same

c = Case(
    64,
    "selective checkpointing of a result that is then changed in place",
    "pytorch/pytorch#119590 #113737",
    "same gradients as plain, or an error; never wrong numbers",
)
torch.manual_seed(0)
w = nn.Parameter(torch.randn(8, 8))
x = torch.randn(4, 8)


def fn(h):
    return torch.selu_(h @ w) * 2


def go(sac):
    w.grad = None
    o = (
        tck(
            fn,
            x,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
        )
        if sac
        else fn(x)
    )
    o.square().sum().backward()
    return {"w": w.grad.clone()}


ref = go(False)
try:
    c.row("stock SAC", *same(ref, go(True)))
except RuntimeError as e:
    c.row("stock SAC", "mutated" in str(e), f"loud: {str(e)[:90]}")
c.end()
