import torch
from torch.utils.checkpoint import checkpoint as tck

from _common import ADAPTER, BACKENDS, Block, Case, add_lora, ck_variants, flux_inputs, off_variants, tiny_flux

c = Case(
    10,
    "validation under no_grad / inference_mode still goes through the checkpoint or offload path",
    "huggingface/diffusers#10107; bghira/SimpleTuner PR#1184; aqlaboratory/openfold#109",
    "with grad off: plain call, no copies, no pool buffers, no warnings",
)
m = add_lora(tiny_flux())
n = [0]


def counting(module, *a):
    n[0] += 1
    return tck(module.__call__, *a, use_reentrant=False)


m.enable_gradient_checkpointing(counting)
m.train()
for nm, ctx in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
    n[0] = 0
    with ctx():
        m(**flux_inputs())
    c.row(f"stock {nm}", n[0] == 0, f"{n[0]} checkpoint calls")
for name, off in off_variants("stock-copy_offload"):
    packs = [0]
    orig = torch.Tensor.copy_

    def spy(s, *a, **k):
        packs[0] += 1
        return orig(s, *a, **k)

    torch.Tensor.copy_ = spy
    try:
        with torch.no_grad(), off():
            Block()(torch.randn(1, 4, 32))
    finally:
        torch.Tensor.copy_ = orig
    c.row(name, packs[0] == 0, f"{packs[0]} host copies")


def hooks_entered(fn):
    """How often saved-tensor hooks are put on while fn runs."""
    count = [0]
    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def spy(self):
        count[0] += 1
        return enter(self)

    torch.autograd.graph.saved_tensors_hooks.__enter__ = spy
    try:
        fn()
    finally:
        torch.autograd.graph.saved_tensors_hooks.__enter__ = enter
    return count[0]


for nm, ctx in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
    for name, ck in ck_variants("stock-nonreentrant"):
        with ctx():
            n = hooks_entered(lambda: ck(Block(), torch.randn(1, 4, 32)))
        c.row(name, n == 0, f"{nm}: saved-tensor hooks entered {n} times")
    for b in BACKENDS if ADAPTER is not None and hasattr(ADAPTER, "enable") else ():
        m = add_lora(tiny_flux())
        ADAPTER.enable(m, backend=b)
        calls = [0]
        blocks = [*m.transformer_blocks, *m.single_transformer_blocks]
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        with ctx():
            n = hooks_entered(lambda: m(**flux_inputs()))
        c.row(
            f"adapter[{b}] model",
            n == 0 and calls[0] == 4,
            f"{nm}: hooks entered {n} times, {calls[0]} block calls of 4",
        )
c.end()
