import torch
from torch import nn

from _common import ADAPTER, BACKENDS, Block, Case, grads, nonreentrant, same, zero

c = Case(
    73,
    "bucketed resolutions / frame counts / last small batch: a pool keyed by exact size grows with every new shape",
    "pytorch/pytorch PR#186161 (keyed by size, grows on first use); unslothai/unsloth-zoo PR#534",
    "after a pass over all buckets, pool bytes stay near the largest single step (say 1.5x), whatever the order; a smaller batch reuses a larger buffer; a larger one does not corrupt a live one",
)
torch.manual_seed(0)
m = nn.ModuleList([Block(), Block()])
shapes = [(b, s, 32) for b in (1, 2, 3) for s in (5, 8, 13, 21, 34, 55)]
step_bytes = max(b * s * 32 * 4 * 2 for b, s, _ in shapes)
pool = {}


def naive(fn, h):
    pool.setdefault((h.shape, len(pool) % 2), torch.empty(h.shape)).copy_(h.detach())
    return nonreentrant(fn, h)


def run(ck):
    for s in shapes + shapes[::-1]:
        zero(m)
        x = torch.randn(*s)
        h = (x * 1).requires_grad_()
        for b in m:
            h = ck(b, h)
        h.square().mean().backward()
        g = grads(m)
        zero(m)
        h = x
        for b in m:
            h = b(h)
        h.square().mean().backward()
        ok, d = same(grads(m), g)
        if not ok:
            return False, f"{s}: {d}"
    return True, "all gradients right"


ok, d = run(naive)
n = sum(t.numel() * 4 for t in pool.values())
c.row("naive-exact-size pool", ok and n <= 1.5 * step_bytes, f"{d}; {n} bytes held, largest step needs {step_bytes}")
c.try_("stock-nonreentrant", lambda: run(nonreentrant))
if ADAPTER is not None and hasattr(ADAPTER, "checkpoint"):
    for b in BACKENDS:
        if hasattr(ADAPTER, "pool_reset"):
            ADAPTER.pool_reset()

        def r():
            ok, d = run(lambda f, h: ADAPTER.checkpoint(f, h, backend=b))
            n = ADAPTER.pool_bytes() if hasattr(ADAPTER, "pool_bytes") else 0
            return ok and n <= 1.5 * step_bytes + 2**20, f"{d}; {n} bytes"

        c.try_(f"adapter[{b}]", r)
c.end()
