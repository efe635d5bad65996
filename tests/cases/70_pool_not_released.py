import torch

from _common import ADAPTER, Case, add_lora, flux_inputs, tiny_flux

c = Case(
    70,
    "pool buffers stay after training ends (or the model is dropped): no host or device memory comes back",
    "unslothai/unsloth PR#3834 (zoo PR#435); pytorch/pytorch PR#186161",
    "disable()/reset/close, or the end of the last graph, frees every buffer; a second run in the same process starts clean",
)
if ADAPTER is None or not hasattr(ADAPTER, "pool_bytes"):
    c.note(
        "needs an adapter with pool_bytes()/pool_reset(); stock torch has no pool (its pinned caching allocator never returns blocks to the system)"
    )
else:
    m = add_lora(tiny_flux())
    ADAPTER.enable(m, backend="unsloth")
    m.train()
    m(**flux_inputs())[0].mean().backward()
    a = ADAPTER.pool_bytes()
    ADAPTER.disable(m)
    b = ADAPTER.pool_bytes()
    c.row("adapter disable", a > 0 == b, f"{a} -> {b}")
    m2 = add_lora(tiny_flux())
    ADAPTER.enable(m2, backend="unsloth")
    out = m2(**flux_inputs())[0]
    a = ADAPTER.pool_bytes()
    ADAPTER.disable(m2)
    b = ADAPTER.pool_bytes()
    out.mean().backward()
    del out
    c.row("adapter last graph", a >= b > 0 == ADAPTER.pool_bytes(), f"{a} -> {b} -> {ADAPTER.pool_bytes()}")
    with ADAPTER.offload():
        out = (torch.randn(64, requires_grad=True) * 2).exp().sum()
    out.backward()
    del out
    a = ADAPTER.pool_bytes()
    ADAPTER.pool_reset()
    c.row("adapter reset", a > 0 == ADAPTER.pool_bytes(), f"{a} -> {ADAPTER.pool_bytes()}")
c.end()
