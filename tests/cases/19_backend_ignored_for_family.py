from _common import ADAPTER, Case, add_lora, flux_inputs, tiny_flux

c = Case(
    19,
    "the backend option is accepted but this family never reads it",
    "bghira/SimpleTuner PR#2904 PR#2533; kohya-ss/musubi-tuner PR#1101; Nerogar/OneTrainer#1136",
    "for every family: either the backend is really used (checked by counting offload copies), or an error names the families that have it",
)
import diffusers

fams = [n for n in dir(diffusers) if n.endswith(("Transformer2DModel", "Transformer3DModel", "Transformer1DModel"))]
with_fn = [n for n in fams if getattr(getattr(diffusers, n), "_supports_gradient_checkpointing", False)]
c.row("stock", True, f"{len(fams)} transformer classes, {len(with_fn)} claim checkpointing; none has a backend choice")
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for b in ("torch", "torch-ffn", "torch-selective", "unsloth", "unsloth-ffn", "unsloth-selective"):

        def r():
            m = add_lora(tiny_flux())
            ADAPTER.enable(m, backend=b)
            m.train()
            m(**flux_inputs())[0].mean().backward()
            used = ADAPTER.stats()
            moved = used["d2h_bytes"] > 0 and used["h2d_bytes"] > 0
            return used["recompute_calls"] > 0 and moved == b.startswith("unsloth"), f"stats {used}"

        c.try_(f"adapter flux/{b}", r)
c.end()
