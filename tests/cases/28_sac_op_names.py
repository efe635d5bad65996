from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import Case

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
c.end()
