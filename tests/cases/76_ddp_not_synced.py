import queue
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from _common import Block, Case, ck_variants

TITLE = "two ranks end a step with different gradients (checkpoint + DDP, two tasks in one step, accumulation, forward-patched LoRA)"


class Net(nn.Module):
    def __init__(s, ck):
        super().__init__()
        s.bs = nn.ModuleList([Block(), Block()])
        s.ck = ck

    def forward(s, x):
        for b in s.bs:
            x = s.ck(b, x)
        return x


SCENARIOS = ("one", "two tasks", "accumulate")


def work(rank, f, q, name):
    dist.init_process_group("gloo", init_method="file://" + f, rank=rank, world_size=2)
    ck = dict(ck_variants("plain", "stock-nonreentrant", "stock-reentrant"))[name]
    for scenario in SCENARIOS:
        step(rank, q, ck, scenario)
    dist.destroy_process_group()


def step(rank, q, ck, scenario):
    try:
        torch.manual_seed(0)
        m = DDP(Net(ck))
        torch.manual_seed(10 + rank)
        xs = [torch.randn(2, 8, 32).requires_grad_() for _ in range(2)]
        if scenario == "two tasks":
            sum(m(x).square().mean() for x in xs).backward()
        elif scenario == "accumulate":
            with m.no_sync():
                m(xs[0]).square().mean().backward()
            m(xs[1]).square().mean().backward()
        else:
            m(xs[0]).square().mean().backward()
        g = torch.cat([p.grad.flatten() for p in m.parameters() if p.requires_grad])
        o = [torch.zeros_like(g) for _ in range(2)]
        dist.all_gather(o, g)
        if rank == 0:
            q.put((torch.allclose(o[0], o[1]), f"max rank difference {(o[0] - o[1]).abs().max():.2g}", g.sum().item()))
    except Exception as e:
        if rank == 0:
            q.put((False, f"{type(e).__name__}: {str(e).splitlines()[0][:120]}", None))


if __name__ == "__main__":
    c = Case(
        76,
        TITLE,
        "pytorch/pytorch#121594 #109191; kohya-ss/sd-scripts PR#989 PR#1064",
        "after the synchronising backward all ranks hold equal gradients, equal to those without checkpointing",
    )
    refs = {}
    for name, _ in ck_variants("plain", "stock-nonreentrant", "stock-reentrant"):
        cx = mp.get_context("spawn")
        q = cx.Queue()
        with tempfile.TemporaryDirectory() as folder:
            ps = [cx.Process(target=work, args=(r, folder + "/store", q, name)) for r in range(2)]
            for p in ps:
                p.start()
            for sc in SCENARIOS:
                try:
                    ok, d, s = q.get(timeout=120)
                except queue.Empty:
                    ok, d, s = False, "a rank died or hung", None
                ref = refs.setdefault(sc, s)
                c.row(name, ok and s is not None and abs(s - ref) < 1e-3 * max(1, abs(ref)), f"{sc}: {d}")
            for p in ps:
                p.join(5)
                if p.is_alive():
                    p.terminate()
    c.end()
