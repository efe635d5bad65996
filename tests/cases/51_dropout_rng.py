import torch
from torch.utils.checkpoint import checkpoint as tck

from _common import Block, Case, ck_variants, grads, plain, same, zero

c = Case(
    51,
    "dropout draws a new mask on recompute (LoRA dropout, stochastic depth)",
    "allenai/OLMo-core PR#828; openai/guided-diffusion#167; ankanbhunia/PIDM PR#66; pytorch/torchtitan#1323",
    "RNG is preserved by default; gradients equal the plain run; the stream after the step equals the plain run (next batch identical)",
)
torch.manual_seed(0)
m = Block(dropout=0.5)
x = torch.randn(2, 8, 32)


def go(ck):
    zero(m)
    torch.manual_seed(7)
    ck(m, (x * 1).requires_grad_()).square().mean().backward()
    return grads(m), torch.rand(1).item()


ref, nxt = go(plain)
vs = [
    *ck_variants("stock-nonreentrant", "stock-reentrant", "naive-offload"),
    ("stock preserve_rng=False", lambda f, *a: tck(f, *a, use_reentrant=False, preserve_rng_state=False)),
]
for name, ck in vs:

    def r():
        g, n = go(ck)
        ok, d = same(ref, g)
        return ok and n == nxt, f"{d}; next random equal: {n == nxt}"

    c.try_(name, r)
c.end()
