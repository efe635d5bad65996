import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from _common import Block, Case, ck_variants, grads, plain, same

c = Case(
    75,
    "DDP: 'marked as ready twice' with checkpointing (shared block, find_unused_parameters, two forwards)",
    "huggingface/accelerate#2017 #389; huggingface/peft#313; huggingface/transformers#15191; microsoft/FocalNet#4; lucidrains/DALLE2-pytorch#225; pytorch#24005",
    "works in every combination that works without checkpointing, same gradients",
)
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)


class Net(nn.Module):
    def __init__(s, ck, shared):
        super().__init__()
        s.pre = nn.Linear(32, 32)
        s.bs = nn.ModuleList([Block(), Block()])
        s.ck = ck
        s.shared = shared

    def forward(s, x):
        h = s.pre(x)
        for b in s.bs:
            h = s.ck(b, h)
        return s.ck(s.bs[0], h) if s.shared else h


def go(ck, shared, unused, static, twice):
    torch.manual_seed(0)
    m = DDP(Net(ck, shared), find_unused_parameters=unused, static_graph=static)
    x = torch.randn(2, 8, 32)
    o = m(x).square().mean() + (m(x * 2).square().mean() if twice else 0)
    o.backward()
    return grads(m)


for shared in (False, True):
    for unused, static in ((False, False), (True, False), (False, True)):
        for twice in (False, True):
            lab = f"shared={int(shared)} unused={int(unused)} static={int(static)} two_fwd={int(twice)}"
            try:
                ref = go(plain, shared, unused, static, twice)
            except Exception as e:
                c.note(f"plain fails: {lab}: {str(e).splitlines()[0][:70]}")
                continue
            for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant"):

                def r():
                    ok, d = same(ref, go(ck, shared, unused, static, twice))
                    return ok, f"{lab}: {d}"

                c.try_(name, r)
dist.destroy_process_group()
c.end()
