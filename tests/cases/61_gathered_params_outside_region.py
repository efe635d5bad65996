import torch
from torch import nn

from _common import Case, LoRALinear, ck_variants, zero

c = Case(
    61,
    "the parameter-gather hook (ZeRO-3 / FSDP) is outside the recomputed region: recompute sees empty weights of shape [0]",
    "deepspeedai/DeepSpeed PR#8148; Joluck/RWKV-PEFT#58; OpenRLHF#569; Lightning-AI#19267; transformers#34928 #28499; LlamaFactory#9064; trl#5217; pytorch#82203",
    "the library checkpoints module.__call__ (hooks inside the region), or says that the order is wrong",
)


class Gathered(nn.Module):
    """stands in for a sharded module: the weight is there only between pre- and post-forward hooks"""

    def __init__(s):
        super().__init__()
        s.l = LoRALinear(8, 8)
        s.full = s.l.base.weight.data.clone()
        s.l.base.weight.data = torch.empty(0)
        s.register_forward_pre_hook(lambda m, a: setattr(m.l.base.weight, "data", m.full))
        s.register_forward_hook(lambda m, a, o: setattr(m.l.base.weight, "data", torch.empty(0)))
        s.register_full_backward_pre_hook(lambda m, g: setattr(m.l.base.weight, "data", m.full)) if False else None

    def forward(s, x):
        return torch.sin(s.l(x))


torch.manual_seed(0)
m = Gathered()
x = torch.randn(4, 8)
for name, ck in ck_variants("stock-nonreentrant", "naive-offload"):
    for how, fn in (("module.__call__", lambda h: m(h)),):

        def r():
            zero(m)
            m.l.base.weight.data = torch.empty(0)
            o = ck(fn, (x * 1).requires_grad_())
            o.sum().backward()
            left = m.l.base.weight.numel()
            return (
                m.l.lora_A.weight.grad is not None and left == 0,
                f"{how}: weight elements still gathered after backward: {left} (early stop skips the post-forward hook)"
                if left
                else how,
            )

        c.try_(name, r)
c.note(
    "checkpointing module.forward instead of module.__call__ leaves the gather hook outside: recompute then multiplies by an empty weight (the cited CheckpointError, shape [0])"
)
c.end()
