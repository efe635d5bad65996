from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _common import ADAPTER, Case, grads, same

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
if ADAPTER is not None and hasattr(ADAPTER, "enable"):

    class Attention(nn.Module):
        """What its kernel gave out, the very thing to be kept, is changed in place."""

        def __init__(self, attend, change):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
            self.attend, self.change = attend, change

        def forward(self, h):
            q, k, v = self.qkv(h).view(1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
            y = self.change(self.attend(q, k, v))
            return self.out(y.transpose(1, 2).reshape(4, 8))

    class Layer(nn.Module):
        def __init__(self, attend, change):
            super().__init__()
            self.attn = Attention(attend, change)

        def forward(self, h):
            return h + self.attn(h) * 2

    def view_times_two(y):
        y[..., :2].mul_(2)
        return y

    sdpa = nn.functional.scaled_dot_product_attention

    def by_math(q, k, v):  # does not save its output, so that the change is allowed
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return sdpa(q, k, v)

    def without_grad(q, k, v):  # saves nothing
        return sdpa(q.detach(), k.detach(), v.detach())

    kernels = {"flash": sdpa, "math": by_math, "without grad": without_grad}
    changes = {"selu_": torch.selu_, "mul_": lambda y: y.mul_(3), "view": view_times_two, "none": lambda y: y}
    for kernel, change in [(kernel, change) for kernel in kernels for change in changes]:
        name = f"{kernel} {change}"
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(Layer(kernels[kernel], changes[change]) for _ in range(3))

        def step():
            model.zero_grad()
            h = x
            for b in model.blocks:
                h = b(h)
            h.square().sum().backward()
            return grads(model)

        try:
            expected = step()
        except RuntimeError as e:
            expected = None
            c.note(f"{name}: the plain run raises: {str(e)[:70]}")
        for backend in ("torch-selective", "unsloth-selective"):

            def r():
                ADAPTER.enable(model, backend=backend)
                try:
                    return same(expected or {}, step(), 0)
                finally:
                    ADAPTER.disable(model)

            if expected is None:
                c.raises(f"adapter {backend} {name}", r, RuntimeError, "inplace")
            else:
                c.try_(f"adapter {backend} {name}", r)
c.end()
