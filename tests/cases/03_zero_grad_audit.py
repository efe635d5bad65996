import warnings

import torch
from torch import nn

from _common import ADAPTER, Block, Case, reentrant, zero

c = Case(
    3,
    "finite loss, zero adapter gradient, nobody is told",
    "NVIDIA-NeMo/Megatron-Bridge PR#5586; locuslab/open-unlearning#178",
    "after the first backward the library/trainer raises or warns, naming the trainable parameters that got no gradient",
)
# An adapter library is asked to audit: ADAPTER.audit(model) -> list of trainable parameter names without gradient
torch.manual_seed(0)
m = nn.ModuleList([Block(), Block()])
x = torch.randn(2, 8, 32)
head = nn.Linear(32, 1)
zero(m)
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter("always")
    h = reentrant(m[0], x)
    h = reentrant(m[1], h)
    head(h).mean().backward()
missing = [n for n, p in m.named_parameters() if p.requires_grad and p.grad is None]
c.row(
    "stock-reentrant",
    not missing,
    f"{len(missing)} trainable tensors without grad; torch said: {[str(i.message)[:60] for i in w if 'requires_grad' in str(i.message)][:1]}",
)
if ADAPTER is not None and hasattr(ADAPTER, "audit"):
    c.try_("adapter[audit]", lambda: (sorted(ADAPTER.audit(m)) == sorted(missing), "lists exactly the silent ones"))
c.end()
