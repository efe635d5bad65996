import torch
from torch import nn

from _common import Case, ck_variants

c = Case(
    7,
    "a checkpointed function that returns a view or its own input",
    "pytorch/pytorch#21970",
    "the gradient is that of the plain run for a view, an alias, and an identity",
)
torch.manual_seed(0)
w = nn.Parameter(torch.randn(4, 4))
fns = {
    "view": lambda x: (x @ w).view(-1),
    "slice": lambda x: (x @ w)[:, 1:],
    "transpose": lambda x: (x @ w).t(),
    "identity": lambda x: x,
    "expand": lambda x: (x @ w).sum(1, keepdim=True).expand(4, 5),
}
for fname, fn in fns.items():
    x = torch.randn(4, 4, requires_grad=True)
    fn(x).square().sum().backward()
    gx, gw = x.grad.clone(), (None if w.grad is None else w.grad.clone())
    for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

        def run():
            y = x.detach().clone().requires_grad_()
            w.grad = None
            ck(fn, y).square().sum().backward()
            ok = (
                torch.allclose(y.grad, gx)
                and (gw is None) == (w.grad is None)
                and (gw is None or torch.allclose(w.grad, gw))
            )
            return ok, fname

        c.try_(name, run)
    w.grad = None
c.end()
