from _common import ADAPTER, BACKENDS, Case, add_lora, naive_offload, tiny_flux

c = Case(
    29,
    "switching a backend on for one model changes torch.utils.checkpoint for every model, and off does not undo it",
    "unslothai/unsloth PR#7287",
    "per-model state only; torch.utils.checkpoint.checkpoint is the same object before, during and after; disable restores everything",
)
import torch.utils.checkpoint as U

before = U.checkpoint


def naive_enable():
    U.checkpoint = lambda fn, *a, **k: naive_offload(fn, *a)


naive_enable()
c.row("naive-monkeypatch", U.checkpoint is before, "torch.utils.checkpoint.checkpoint replaced for the whole process")
U.checkpoint = before
m = tiny_flux()
fw = {n: type(s).forward for n, s in m.named_modules()}
m.enable_gradient_checkpointing()
m.disable_gradient_checkpointing()
c.row(
    "stock diffusers off",
    not any(getattr(s, "gradient_checkpointing", False) for s in m.modules()),
    f"switch off again; left-over function: {m._gradient_checkpointing_func is not None}",
)
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for b in BACKENDS:
        a, o = add_lora(tiny_flux()), add_lora(tiny_flux())
        keys = list(a.state_dict())
        names = [n for n, _ in a.named_modules()]
        ADAPTER.enable(a, backend=b)
        d1 = U.checkpoint is before
        other = not getattr(o, "gradient_checkpointing", False)
        ADAPTER.disable(a)
        c.row(
            f"adapter[{b}]",
            d1
            and other
            and U.checkpoint is before
            and keys == list(a.state_dict())
            and names == [n for n, _ in a.named_modules()]
            and "forward" not in a.transformer_blocks[0].__dict__,
            f"patched={not d1}, other model touched={not other}",
        )
c.end()
