import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import CLIPTextConfig, CLIPTextModel

from _common import ADAPTER, Case, grads, same, zero

c = Case(
    5,
    "the caller's use_reentrant choice is overwritten by a later enable call",
    "huggingface/transformers#26221 #33634; peft#1142",
    "the last explicit choice wins and is reported; a default must never undo it; adapters train either way",
)
torch.manual_seed(0)
m = CLIPTextModel(
    CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
)
m.requires_grad_(False)
inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), m)
m.train()
ids = torch.arange(8)[None]


def run(setup):
    setup()
    zero(m)
    m(ids).last_hidden_state.square().mean().backward()
    miss = [n for n, p in m.named_parameters() if p.requires_grad and p.grad is None]
    return not miss, f"{len(miss)} adapters without grad"


c.try_(
    "explicit False",
    lambda: run(lambda: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})),
)
c.try_(
    "False, then enable()",
    lambda: run(
        lambda: (
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}),
            m.gradient_checkpointing_enable(),
        )
    ),
)
c.try_(
    "explicit True",
    lambda: run(lambda: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})),
)
if ADAPTER is not None and hasattr(ADAPTER, "enable"):

    def after_default():
        """Enabled here, then by somebody's default: still right, and every adapter trains."""
        m.gradient_checkpointing_disable()
        run(lambda: None)
        ref = grads(m)
        ADAPTER.enable(m)
        ok, d = run(m.gradient_checkpointing_enable)
        same_, d2 = same(ref, grads(m))
        return ok and same_, f"{d}; {d2}"

    c.try_("adapter, then enable()", after_default)
    c.raises("adapter twice", lambda: ADAPTER.enable(m, interval=2), ValueError, "already")
if ADAPTER is not None and hasattr(ADAPTER, "checkpoint"):
    for kw in ({"use_reentrant": True}, {"use_rentrant": False}):
        c.raises(
            f"adapter{kw}",
            lambda: ADAPTER.checkpoint(torch.sin, torch.ones(1), **kw),
            (ValueError, TypeError),
            "use_re",
        )
c.end()
