import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from _common import Block, Case, ck_variants, plain, same

c = Case(
    40,
    "FSDP2 + checkpoint: inputs cast in the forward are not cast on recompute; autocast lost",
    "pytorch/pytorch#159359 #148831; huggingface/trl#4314",
    "works for checkpoint inside and outside fully_shard, with mixed precision and with autocast; same gradients as without checkpointing",
)
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


class Ck(nn.Module):
    def __init__(s, b, ck):
        super().__init__()
        s.b = b
        s.ck = ck

    def forward(s, x):
        return s.ck(s.b, x)


def go(order, ck, amp):
    torch.manual_seed(0)
    b = Block()
    pol = MixedPrecisionPolicy(param_dtype=None if amp else torch.bfloat16, cast_forward_inputs=True)
    b.requires_grad_(True)
    if order == "ck(fsdp(b))":
        fully_shard(b, mesh=mesh, mp_policy=pol)
        mod = Ck(b, ck)
    else:
        mod = Ck(b, ck)
        fully_shard(mod, mesh=mesh, mp_policy=pol)
    x = torch.randn(2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        o = mod(x)
    o.float().square().mean().backward()
    return {n: p.grad.full_tensor().float() for n, p in mod.named_parameters() if p.grad is not None}


for amp in (False, True):
    for order in ("ck(fsdp(b))", "fsdp(ck(b))"):
        try:
            ref = go(order, plain, amp)
        except Exception as e:
            c.note(f"plain {order}: {type(e).__name__} {str(e)[:100]}")
            continue
        for name, ck in ck_variants("stock-nonreentrant", "stock-reentrant"):

            def r():
                g = go(order, ck, amp)
                ok, d = same(ref, g, 5e-3)
                return ok and len(g) == len(ref) and len(g) > 0, f"{order} amp={amp}: {len(g)} grads; {d}"

            c.try_(name, r)
dist.destroy_process_group()
c.end()
