import shutil

import torch
from torch import nn

from _common import ADAPTER, WITH_STOCK, Block, Case, ck_variants, nonreentrant, plain

c = Case(
    88,
    "checkpointing inside a compiled function does not lower memory (common subexpressions merged back, two passes over shared blocks)",
    "pytorch/pytorch PR#102233 #193193 #149258",
    "bytes held between forward and backward under compile are at most those of eager checkpointing (+10 %); peak of two traversals does not explode",
)
torch.manual_seed(0)
bs = nn.ModuleList(Block() for _ in range(4))
x = torch.randn(4, 64, 32)


def model(ck, passes):
    def f(h):
        out = 0
        for p in range(passes):
            g = h * (p + 1)
            for b in bs:
                g = ck(b, g)
            out = out + g
        return out

    return f


def held(fn):
    n = [0]
    seen = set()
    par = {p.untyped_storage().data_ptr() for p in bs.parameters()}

    def pack(t):
        k = t.untyped_storage().data_ptr()
        if k not in seen and k not in par:
            seen.add(k)
            n[0] += t.untyped_storage().nbytes()
        return t

    h = (x * 1).requires_grad_()
    fn(h)  # warm-up: compile
    n[0] = 0
    seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        o = fn(h)
    o.sum().backward()
    return n[0]


COMPILERS = ("aot_eager_decomp_partition", *(("inductor",) if shutil.which("c++") else ()))
for passes in (1, 2):
    e0, e1 = held(model(plain, passes)), held(model(nonreentrant, passes))
    for compiler in COMPILERS:
        if compiler == "inductor" and passes == 2 and not WITH_STOCK:
            continue  # half a minute of C++ compilation that tells nothing new
        for name, ck in ck_variants("stock-nonreentrant"):

            def r():
                torch._dynamo.reset()
                n = held(torch.compile(model(ck, passes), backend=compiler))
                return n <= 1.1 * e1, f"passes={passes} {compiler}: held {n}; eager none {e0}, eager checkpoint {e1}"

            c.try_(name, r)
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    tower = nn.Module()
    tower.blocks = bs
    e1 = held(model(nonreentrant, 1))
    for b in bs:
        b.compile(backend="aot_eager")
    for interval in (1, 2):
        ADAPTER.enable(tower, interval=interval)
        n = held(model(plain, 1))
        c.row(
            "adapter[enable]", n <= 1.1 * e1, f"compiled blocks, interval {interval}: held {n}; eager checkpoint {e1}"
        )
        ADAPTER.disable(tower)
c.end()
