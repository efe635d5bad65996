import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from _common import ADAPTER, Case, add_lora, flux_inputs, tiny_flux

c = Case(
    77,
    "enable called on a model already wrapped by DDP / torch.compile / PEFT",
    "bghira/SimpleTuner#972; alibaba/animate-anything#55; mlfoundations/open_lm PR#234; jquesnelle/yarn#44",
    "enable/disable/describe unwrap .module and ._orig_mod and PEFT wrappers, or say in words to call it before",
)
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
from peft import LoraConfig, get_peft_model

wraps = {
    "DDP": lambda: DDP(add_lora(tiny_flux())),
    "compile": lambda: torch.compile(add_lora(tiny_flux()), backend="eager"),
    "peft": lambda: get_peft_model(tiny_flux(), LoraConfig(target_modules=["to_q"])),
    "DDP(compile)": lambda: DDP(torch.compile(add_lora(tiny_flux()), backend="eager")),
}
for k, mk in wraps.items():

    def r():
        m = mk()
        m.enable_gradient_checkpointing()
        return True, "ok"

    c.try_(f"stock {k}", r)
    if ADAPTER is not None and hasattr(ADAPTER, "enable"):

        def r2():
            m = mk()
            ADAPTER.enable(m)
            m.train()
            m(**flux_inputs())[0].mean().backward()
            return True, "enabled and ran"

        c.try_(f"adapter[{k}]", r2)
dist.destroy_process_group()
c.end()
