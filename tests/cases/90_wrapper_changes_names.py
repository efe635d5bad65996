from peft import get_peft_model_state_dict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from _common import ADAPTER, BACKENDS, Case, add_lora, tiny_flux

c = Case(
    90,
    "a wrapper module changes names: saved LoRA keys, optimizer groups by name, target_modules added later, resume without the wrapper",
    "pytorch/pytorch PR#77224; huggingface/diffusers#3279",
    "state_dict, named_parameters, named_modules and exported LoRA keys are the same with the library on and off, in every order (enable -> add_adapter, add_adapter -> enable, enable -> load)",
)
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock


def names(m):
    return (
        sorted(n for n, _ in m.named_parameters()),
        sorted(m.state_dict()),
        sorted(get_peft_model_state_dict(m)),
        sorted(n for n, _ in m.named_modules()),
    )


base = names(add_lora(tiny_flux()))
m = add_lora(tiny_flux())
apply_activation_checkpointing(m, check_fn=lambda k: isinstance(k, FluxTransformerBlock))
got = names(m)
for lab, a, b in zip(("named_parameters", "state_dict", "LoRA export", "named_modules"), base, got):
    c.row(
        f"stock checkpoint_wrapper {lab}",
        a == b,
        f"{len(a)} names without, {len(b)} with; {len(set(b) - set(a))} new, {len(set(a) - set(b))} lost, e.g. {next(iter(set(b) - set(a)), '-')}",
    )
m = tiny_flux()
apply_activation_checkpointing(m, check_fn=lambda k: isinstance(k, FluxTransformerBlock))
add_lora(m)
got = names(m)
c.row("stock wrap then add_adapter", base[2] == got[2], f"{len(base[2])} LoRA keys expected, {len(got[2])} exported")
m = add_lora(tiny_flux())
m.enable_gradient_checkpointing()
c.row("stock diffusers enable", names(m) == base, "")
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for b in [scope for backend in BACKENDS for scope in (backend, f"{backend}-ffn")]:

        def r():
            m = add_lora(tiny_flux())
            ADAPTER.enable(m, backend=b)
            m2 = tiny_flux()
            ADAPTER.enable(m2, backend=b)
            add_lora(m2)
            return names(m) == base and names(m2) == base, b

        c.try_("adapter", r)
c.end()
