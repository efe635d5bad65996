import torch
from peft import get_peft_model_state_dict

from _common import Case, add_lora, tiny_flux

c = Case(
    91,
    "_orig_mod. in saved LoRA keys after compiling blocks; other tools then load nothing",
    "kohya-ss/sd-scripts PR#1024; meta-pytorch/torchtune#1399; huggingface/pytorch-image-models PR#2003; facebookresearch/fairseq#5096",
    "the trainer's export has the same keys as without compile, checkpoint or DDP; loading tells how many keys matched",
)
base = sorted(get_peft_model_state_dict(add_lora(tiny_flux())))
m = add_lora(tiny_flux())
for i, b in enumerate(m.transformer_blocks):
    m.transformer_blocks[i] = torch.compile(b, backend="eager")
got = sorted(get_peft_model_state_dict(m))
c.row(
    "stock torch.compile(block)",
    got == base,
    f"{len(set(got) - set(base))} changed keys, e.g. {next(iter(set(got) - set(base)), '-')}",
)
m = add_lora(tiny_flux())
for b in m.transformer_blocks:
    b.compile(backend="eager")
c.row("stock block.compile()", sorted(get_peft_model_state_dict(m)) == base, "in-place compile keeps names")
c.end()
