from _common import ADAPTER, BACKENDS, Case, add_lora, flux_inputs, grads, same, tiny_flux, zero

c = Case(
    12,
    "model.gradient_checkpointing = True set by hand instead of the enable call",
    "NVlabs/Sana#170",
    "either it works or the error says what to call; never 'NoneType is not callable'",
)
m = add_lora(tiny_flux())
m.train()
m.gradient_checkpointing = True


def run():
    m(**flux_inputs())[0].mean().backward()
    return True, "worked"


try:
    run()
    c.row("stock", True, "worked")
except Exception as e:
    c.row("stock", "enable_gradient_checkpointing" in str(e), f"{type(e).__name__}: {e}")


def step(m):
    zero(m)
    m(**flux_inputs())[0].mean().backward()
    return grads(m)


def never_set(m):
    pass


def enabled_too(m):
    m.enable_gradient_checkpointing()


def by_hand(m):
    m.gradient_checkpointing = True


if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    ref = step(add_lora(tiny_flux()))
    for b in BACKENDS:
        for how in (never_set, enabled_too, by_hand):

            def run():
                m = add_lora(tiny_flux())
                how(m)
                try:
                    ADAPTER.enable(m, backend=b)
                except ValueError as e:
                    return how is by_hand and "gradient_checkpointing" in str(e), f"{how.__name__}: refused: {e}"
                ok, d = same(ref, step(m))
                return ok, f"{how.__name__}: {d}"

            c.try_(f"adapter[{b}]", run)
c.end()
