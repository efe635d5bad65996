import torch

from _common import Block, Case, ck_variants, grads, same, zero

c = Case(
    30,
    "the offloaded wrapper's signature is not the stock one: a flag lands in a tensor's slot",
    "unslothai/unsloth-zoo PR#1218; jzhang38/EasyContext#30",
    "drop-in: use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop are accepted as in torch (honoured, or refused by name), in any order",
)


def naive(fn, *args, **k):
    return _Naive2.apply(fn, *args)


class _Naive2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, preserve, *args):
        if preserve:
            pass
        return fn(*args)

    @staticmethod
    def backward(ctx, g):
        return None, None, g


torch.manual_seed(0)
m = Block()
x = torch.randn(1, 4, 32, requires_grad=True)
c.try_("naive-missing-slot", lambda: (naive(m, x) is not None, ""))
for name, ck in ck_variants("stock-nonreentrant"):
    for kw in (
        {"preserve_rng_state": True},
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
        {"debug": True},
        {"early_stop": False},
    ):

        def r():
            zero(m)
            m(x).mean().backward()
            ref = grads(m)
            zero(m)
            ck(m, x, **kw).mean().backward()
            ok, d = same(ref, grads(m))
            return ok, f"{kw} {d}"

        c.try_(name, r)
c.end()
