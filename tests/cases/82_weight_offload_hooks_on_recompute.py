import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as tck

from _common import Block, Case, ck_variants

c = Case(
    82,
    "weight offload (group offload, block swap, streaming) + checkpointing: post-forward hooks do not run on recompute, order is reversed",
    "huggingface/diffusers#12610; bghira/SimpleTuner PR#1984; Nerogar/OneTrainer PR#1310 (#1241 #1306); kohya-ss/musubi-tuner#889",
    "after backward every offloaded block is off the device again; blocks are brought in before recompute; or the pair of options is refused with a reason",
)


class Swap:
    """stand-in for a weight offloader that hangs on forward hooks; 'on device' is a flag here"""

    def __init__(s, blocks):
        s.on = dict.fromkeys(range(len(blocks)), False)
        s.peak = 0
        s.bad = 0
        for i, b in enumerate(blocks):
            b.register_forward_pre_hook(lambda m, a, i=i: s.load(i))
            b.register_forward_hook(lambda m, a, o, i=i: s.unload(i))
            b.n1.register_forward_pre_hook(lambda m, a, i=i: s.need(i))

    def load(s, i):
        s.on[i] = True
        s.peak = max(s.peak, sum(s.on.values()))

    def unload(s, i):
        s.on[i] = False

    def need(s, i):
        s.bad += not s.on[i]


for name, ck in [
    *ck_variants("plain", "stock-nonreentrant", "naive-offload"),
    ("stock early_stop=False", lambda f, *a: tck(f, *a, use_reentrant=False, early_stop=False)),
]:
    for how in ("__call__",):
        torch.manual_seed(0)
        bs = nn.ModuleList(Block() for _ in range(4))
        sw = Swap(bs)
        h = torch.randn(1, 4, 32).requires_grad_()

        def r():
            g = h
            for b in bs:
                g = ck(b if how == "__call__" else (lambda z, b=b: b.forward(z)), g)
            g.mean().backward()
            left = sum(sw.on.values())
            return (
                left == 0 and sw.bad == 0 and sw.peak <= 2,
                f"{how}: {left} blocks left on the device after backward, peak {sw.peak}, used while absent {sw.bad}",
            )

        c.try_(name, r)
c.end()
