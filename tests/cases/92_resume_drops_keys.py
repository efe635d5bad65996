import os
import tempfile

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from _common import Case, add_lora, tiny_flux

c = Case(
    92,
    "resume loads nothing (prefix mismatch, strict=False) and training starts again from the initial adapter without a word",
    "huggingface/diffusers#3279 #14548; meta-pytorch/torchtune#2537; kohya-ss/musubi-tuner#49",
    "resume compares key sets; zero or partial matches raise with three examples of each side; after resume the first loss equals the last one",
)
m = add_lora(tiny_flux())
sd = {k: v.clone() + 1 for k, v in get_peft_model_state_dict(m).items()}


def after(sd2):
    m2 = add_lora(tiny_flux())
    r = set_peft_model_state_dict(m2, sd2)
    d = get_peft_model_state_dict(m2)
    n = sum(torch.equal(d[k], sd[k]) for k in sd)
    return n, r


for lab, f in (
    ("same keys", lambda k: k),
    ("unet./transformer. prefix", lambda k: "transformer." + k),
    ("base_model.model. prefix", lambda k: "base_model.model." + k),
    ("_orig_mod.", lambda k: k.replace("transformer_blocks.0.", "transformer_blocks.0._orig_mod.")),
    ("kohya names", lambda k: "lora_unet_" + k.replace(".", "_")),
):

    def r():
        n, res = after({f(k): v for k, v in sd.items()})
        un = getattr(res, "unexpected_keys", None)
        return (
            n == len(sd),
            f"{lab}: {n} of {len(sd)} tensors loaded, no exception (peft returned {0 if not un else len(un)} unexpected keys)",
        )

    c.try_("stock peft", r)
try:
    d = tempfile.mkdtemp()
    from diffusers import FluxPipeline

    FluxPipeline.save_lora_weights(d, transformer_lora_layers={"x." + k: v for k, v in sd.items()})
    m3 = tiny_flux()
    m3.load_lora_adapter(os.path.join(d, "pytorch_lora_weights.safetensors"), prefix="transformer")
    c.row("stock diffusers load_lora_adapter", False, "wrong keys accepted without an exception")
except Exception as e:
    c.row("stock diffusers load_lora_adapter", True, f"{type(e).__name__}: {str(e)[:120]}")
c.end()
