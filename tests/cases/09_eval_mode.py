from torch.utils.checkpoint import checkpoint as tck

from _common import ADAPTER, BACKENDS, Case, add_lora, flux_inputs, tiny_flux

c = Case(
    9,
    "checkpointing silently off in eval() mode (LoRA on a model kept in eval)",
    "huggingface/diffusers#9850 PR#9878; victorchall/EveryDream2trainer PR#246",
    "active whenever grad is enabled and something needs grad, whatever model.training says",
)
m = add_lora(tiny_flux())
n = [0]


def counting(module, *a):
    n[0] += 1
    return tck(module.__call__, *a, use_reentrant=False)


m.enable_gradient_checkpointing(counting)
for mode in ("train", "eval"):
    getattr(m, mode)()
    n[0] = 0
    m(**flux_inputs())[0].mean().backward()
    c.row(f"stock {mode}()", n[0] == 4, f"{n[0]} of 4 blocks checkpointed")
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for b in BACKENDS:
        m2 = add_lora(tiny_flux())
        ADAPTER.enable(m2, backend=b)
        m2.eval()
        k = [0]
        hs = [
            blk.register_forward_pre_hook(lambda *_: k.__setitem__(0, k[0] + 1))
            for blk in list(m2.transformer_blocks) + list(m2.single_transformer_blocks)
        ]
        m2(**flux_inputs())[0].mean().backward()
        c.row(f"adapter[{b}] eval", k[0] >= 7, f"{k[0]} block calls in forward+backward (4 would mean: not active)")
c.end()
