import torch
from torch import nn

from _common import ADAPTER, Block, Case, add_lora, flux_inputs, nonreentrant, plain, tiny_flux

c = Case(
    17,
    "the offload flag without the base checkpointing flag uses MORE memory than checkpointing",
    "modelscope/DiffSynth-Studio#446; Nerogar/OneTrainer#1136; kohya-ss/musubi-tuner PR#537",
    "offload alone either implies checkpointing, or is refused/explained; it is never a silent no-op or a silent partial",
)
# saved bytes on the compute device, per mode, for 4 blocks
torch.manual_seed(0)
bs = nn.ModuleList(Block() for _ in range(4))
x = torch.randn(4, 64, 32)


def saved(ck, off):
    tot = [0]
    seen = set()
    par = {p.untyped_storage().data_ptr() for p in bs.parameters()}

    def pack(t):
        k = t.untyped_storage().data_ptr()
        if k not in seen and k not in par:
            seen.add(k)
            tot[0] += t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h = x
        for b in bs:
            h = ck(b, h)
    return tot[0]


a, b = saved(plain, None), saved(nonreentrant, None)
c.row("stock none", True, f"{a} bytes kept")
c.row("stock checkpoint", b < a / 4, f"{b} bytes kept")
c.note("the cited user turned on only the offload switch: kept bytes were those of 'none' minus what the hook moved")
if ADAPTER is not None and hasattr(ADAPTER, "parse"):
    for cfg in (
        {"offload": True},
        {"offload": True, "gradient_checkpointing": False},
        {"activation_offload": True, "layer_offload_fraction": 0.0},
        {"gradient_checkpointing": False, "gradient_checkpointing_offload_attention": True},
    ):
        try:
            r = ADAPTER.parse(cfg)
            c.row(f"adapter{cfg}", bool(r), f"-> {r}")
        except ValueError as e:
            c.row(f"adapter{cfg}", True, f"refused: {e}")
if ADAPTER is not None and hasattr(ADAPTER, "enable") and hasattr(ADAPTER, "inert"):

    def step(backend):
        m = add_lora(tiny_flux())
        ADAPTER.enable(m, backend=backend, offload_attention=True)
        m.train()
        m(**flux_inputs())[0].mean().backward()
        t = ADAPTER.stats()
        return t["d2h_bytes"], t["recompute_calls"], ADAPTER.inert(m)

    def alone():
        moved, recomputed, inert = step(None)
        return moved > 0 and not recomputed and not inert, f"{moved} bytes moved, {recomputed} recomputations"

    def beside():
        moved, recomputed, inert = step("torch")
        return moved == 0 and recomputed > 0 and "offload_attention" in inert, f"{moved} bytes moved, inert: {inert}"

    c.try_("adapter offload alone", alone)
    c.try_("adapter offload + torch", beside)
c.end()
