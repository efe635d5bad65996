import torch

from _common import Block, Case, ck_variants, plain, zero

c = Case(
    79,
    "torch.autograd.grad, backward(inputs=...), retain_graph twice, create_graph (gradient penalty), grad inside the block",
    "pytorch/pytorch#102223 #24005; openai/guided-diffusion PR#144; NVIDIA-NeMo/Automodel PR#3257",
    "all work, or the backend refuses with a sentence; never a wrong or None gradient",
)
torch.manual_seed(0)
m = Block()
x0 = torch.randn(2, 8, 32)
P = [p for p in m.parameters() if p.requires_grad]


def s_grad(ck):
    h = (x0 * 1).requires_grad_()
    return torch.autograd.grad(ck(m, h).square().mean(), P)


def s_inputs(ck):
    zero(m)
    h = (x0 * 1).requires_grad_()
    ck(m, h).square().mean().backward(inputs=P)
    return [p.grad.clone() for p in P]


def s_retain(ck):
    zero(m)
    h = (x0 * 1).requires_grad_()
    l = ck(m, h).square().mean()
    l.backward(retain_graph=True)
    l.backward()
    return [p.grad.clone() for p in P]


def s_double(ck):
    zero(m)
    h = (x0 * 1).requires_grad_()
    l = ck(m, h).square().mean()
    (g,) = torch.autograd.grad(l, h, create_graph=True)
    g.square().sum().backward()
    return [p.grad.clone() for p in P]


def s_inside(ck):
    zero(m)

    def f(h):
        with torch.enable_grad():
            z = m(h).sin().sum()
            (g,) = torch.autograd.grad(z, h, create_graph=True)
        return g

    h = (x0 * 1).requires_grad_()
    ck(f, h).square().mean().backward()
    return [p.grad.clone() for p in P]


from torch.nn.attention import SDPBackend, sdpa_kernel

for nm, s in (
    ("autograd.grad", s_grad),
    ("backward(inputs=)", s_inputs),
    ("retain_graph x2", s_retain),
    ("double backward", s_double),
    ("grad inside block", s_inside),
):
    with sdpa_kernel(SDPBackend.MATH):
        ref = s(plain)
        for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"):

            def r():
                g = s(ck)
                return all(torch.allclose(a, b, atol=1e-6, rtol=1e-3) for a, b in zip(ref, g)), nm

            c.try_(name, r)
c.end()
