import contextlib
import weakref

import torch
from torch import nn

from _common import ADAPTER, Block, Case, nonreentrant

c = Case(
    20,
    "offload works on paper, but the reload runs ahead for all layers and fills the device again",
    "Nerogar/OneTrainer PR#1649; pytorch/torchtitan PR#467 (copies never waited for)",
    "at any moment of backward at most a small fixed number of blocks' activations are back on the device",
)
torch.manual_seed(0)
N = 8
bs = nn.ModuleList(Block() for _ in range(N))
x = torch.randn(4, 64, 32)
live = []
peak = [0]


def note(t):
    live.append(weakref.ref(t))
    peak[0] = max(peak[0], sum(r() is not None for r in live))
    return t


@contextlib.contextmanager
def on_demand():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda b: note(b.clone())):
        yield


@contextlib.contextmanager
def all_ahead():
    st, back = [], {}

    def pack(t):
        st.append(t.detach().clone())
        return len(st) - 1

    def unpack(i):
        if not back:
            back.update({k: note(b.clone()) for k, b in enumerate(st)})
        return back[i]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


vs = [("naive-on-demand", on_demand), ("naive-all-ahead", all_ahead)]
for name, off in vs:
    live.clear()
    peak[0] = 0
    with off():
        h = x
        for b in bs:
            h = nonreentrant(b, h)
    h.mean().backward()
    c.row(name, peak[0] <= 3, f"{peak[0]} restored block inputs alive at once, of {N}")
if ADAPTER is not None and hasattr(ADAPTER, "live_restored"):

    def sampled(call):
        seen = []
        h = x
        for b in bs:
            h = call(b, h)
            h.register_hook(lambda g: seen.append(ADAPTER.live_restored()))
        h.mean().backward()
        return 0 < max(seen) <= 3 * x.nbytes, f"at most {max(seen) / x.nbytes:g} block inputs alive at once, of {N}"

    c.try_("adapter checkpoint", lambda: sampled(lambda b, h: ADAPTER.checkpoint(b, h, backend="unsloth")))
    model = nn.Module()
    model.blocks = bs
    ADAPTER.enable(model, backend="unsloth")
    c.try_("adapter enable", lambda: sampled(lambda b, h: b(h)))
    ADAPTER.disable(model)
c.note("on a GPU compare torch.cuda.max_memory_allocated during backward with 2-3 blocks")
c.end()
