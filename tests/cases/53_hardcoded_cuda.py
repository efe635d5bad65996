import torch

from _common import Block, Case, ck_variants, grads, same, zero

c = Case(
    53,
    "the offload path says 'cuda' in so many words and dies on XPU, NPU, MPS, ROCm-less or CPU",
    "axolotl-ai-cloud/axolotl PR#3995; pytorch/pytorch#128478",
    "device taken from the tensors; on CPU the offload backends run (as a no-op or a copy) and give the plain gradients",
)


class NaiveCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, h):
        ctx.save_for_backward(h.to("cpu", non_blocking=True))
        ctx.fn = fn
        with torch.no_grad():
            return fn(h)

    @staticmethod
    def backward(ctx, g):
        h = ctx.saved_tensors[0].to("cuda", non_blocking=True).detach().requires_grad_()
        with torch.enable_grad():
            o = ctx.fn(h)
        o.backward(g)
        return None, h.grad


torch.manual_seed(0)
m = Block()
x = torch.randn(2, 8, 32)
m(x).mean().backward()
ref = grads(m)
for name, ck in [*ck_variants("stock-nonreentrant"), ("naive-cuda", lambda f, h: NaiveCuda.apply(f, h))]:

    def r():
        zero(m)
        ck(m, (x * 1).requires_grad_()).mean().backward()
        return same(ref, grads(m))

    c.try_(name, r)
c.try_(
    "stock save_on_cpu(pin)",
    lambda: (bool(torch.autograd.graph.save_on_cpu(pin_memory=True)), "constructed on a CPU build"),
)


def pinned():
    zero(m)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        m((x * 1).requires_grad_()).mean().backward()
    return same(ref, grads(m))


c.try_("stock save_on_cpu(pin) run", pinned)
c.end()
