from _common import ADAPTER, Case, tiny_flux

c = Case(
    16,
    "options handed over in the wrong shape are silently ignored",
    "modelscope/ms-swift PR#9470; huggingface/trl#2334",
    "an unknown option name, or an option in the wrong place, raises and lists the valid names",
)
m = tiny_flux()


def run():
    m.enable_gradient_checkpointing(use_reentrant=True)
    return True, "accepted"


c.raises(
    "stock diffusers enable(use_reentrant=)",
    lambda: m.enable_gradient_checkpointing(use_reentrant=True),
    TypeError,
    "use_reentrant",
)
c.raises(
    "stock diffusers enable({...})",
    lambda: m.enable_gradient_checkpointing({"use_reentrant": True}),
    (TypeError, ValueError),
)
c.note(
    "the second is accepted today and fails only at the first forward: the dict is stored as the checkpoint function"
)
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for bad in (
        {"intervall": 2},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"backend": "unslothh"},
        {"backend": None},
    ):
        c.raises(f"adapter{bad}", lambda bad=bad: ADAPTER.enable(tiny_flux(), **bad), (TypeError, ValueError))
c.end()
