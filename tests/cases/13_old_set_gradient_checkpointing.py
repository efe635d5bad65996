import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from _common import ADAPTER, Block, Case

c = Case(
    13,
    "a community model with the old _set_gradient_checkpointing(module, value=False), or none at all",
    "bghira/SimpleTuner#1365; woct0rdho/ACE-Step#2; tianweiy/CausVid#63",
    "library enables it (it finds the blocks itself) or says which model method is missing",
)


class Old(ModelMixin, ConfigMixin):
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gradient_checkpointing = False

    def _set_gradient_checkpointing(self, module, value=False):
        module.gradient_checkpointing = value

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x


m = Old()


def run():
    m.enable_gradient_checkpointing()
    return True, "enabled"


c.try_("stock old signature", run)


class Plain(nn.Module):
    def __init__(s):
        super().__init__()
        s.blocks = nn.ModuleList([Block(), Block()])

    def forward(s, x):
        for b in s.blocks:
            x = b(x)
        return x


c.try_("stock plain nn.Module", lambda: (hasattr(Plain(), "enable_gradient_checkpointing"), "no enable method at all"))
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for cls in (Old, Plain):

        def r():
            mm = cls()
            ADAPTER.enable(mm)
            mm(torch.randn(1, 4, 32)).mean().backward()
            return all(p.grad is not None for p in mm.parameters() if p.requires_grad), cls.__name__

        c.try_(f"adapter[{cls.__name__}]", r)
c.end()
