import shutil

import torch
from torch import nn

from _common import ADAPTER, WITH_STOCK, Block, Case, ck_variants, grads, plain, same, zero

c = Case(
    87,
    "torch.compile + checkpointing + LoRA dropout != 0 fails in the backend",
    "huggingface/peft#3020; pytorch/pytorch#97436; axolotl#312",
    "compiles (whole model and per block) and gives the eager gradients for dropout 0, runs for dropout > 0",
)
COMPILERS = ("aot_eager", "inductor") if shutil.which("c++") else ("aot_eager",)
if "inductor" not in COMPILERS:
    c.note("no C++ compiler on this machine: inductor is not tried")


class Tower(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(2))

    def forward(self, x, ck=plain):
        for b in self.blocks:
            x = ck(b, x)
        return x


def judge(prepare, dropout):
    """prepare(tower) -> a callable; its gradients beside those of the eager tower."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tower = Tower(dropout).train()
    x = torch.randn(2, 8, 32)
    torch.manual_seed(5)
    tower((x * 1).requires_grad_()).square().mean().backward()
    ref = grads(tower)
    zero(tower)
    torch.manual_seed(5)
    prepare(tower)((x * 1).requires_grad_()).square().mean().backward()
    if dropout:
        return all(v is not None for v in grads(tower).values()), "ran"
    return same(ref, grads(tower), 1e-4)


def compile_outside(tower, ck, compiler):
    return torch.compile(lambda h: tower(h, ck), backend=compiler)


def compile_inside(tower, ck, compiler):
    compiled = {b: torch.compile(b, backend=compiler) for b in tower.blocks}
    return lambda h: tower(h, lambda b, x: ck(compiled[b], x))


def attach_then_compile_blocks(tower):
    ADAPTER.enable(tower)
    for b in tower.blocks:
        b.compile(backend="aot_eager")
    return tower


def compile_blocks_then_attach(tower):
    for b in tower.blocks:
        b.compile(backend="aot_eager")
    ADAPTER.enable(tower, interval=2)
    return tower


def attach_then_compile_model(tower):
    ADAPTER.enable(tower)
    return torch.compile(tower, backend="aot_eager")


def try_(name, what, prepare, dropout):
    def run():
        ok, d = judge(prepare, dropout)
        return ok, f"dropout={dropout} {what}: {d}"

    c.try_(name, run)


for dropout in (0.0, 0.3):
    for compiler in COMPILERS:
        if dropout and compiler == "inductor" and not WITH_STOCK:
            continue  # a minute of C++ compilation for a row that only says "ran"
        for name, ck in ck_variants("stock-nonreentrant"):
            for order in (compile_outside, compile_inside):
                try_(name, f"{order.__name__} {compiler}", lambda t: order(t, ck, compiler), dropout)
    if ADAPTER is not None and hasattr(ADAPTER, "enable"):
        for how in (attach_then_compile_blocks, compile_blocks_then_attach, attach_then_compile_model):
            try_("adapter[enable]", how.__name__, how, dropout)
c.end()
