import torch
from peft import prepare_model_for_kbit_training
from transformers import CLIPTextConfig, CLIPTextModel

from _common import ADAPTER, Case

c = Case(
    26,
    "checkpointing: false cannot switch it off for a quantised base (another layer turns it on)",
    "MakazhanAlpamys/Soup#797",
    "the config decides; if another tool changes it, the final state is printed and can be asserted",
)
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
m.is_loaded_in_8bit = True
wanted = False
prepare_model_for_kbit_training(m)
c.row(
    "stock peft prepare_kbit",
    m.is_gradient_checkpointing == wanted,
    f"config said {wanted}, model is_gradient_checkpointing={m.is_gradient_checkpointing}, float32 params: {sum(p.dtype == torch.float32 for p in m.parameters())}",
)
if ADAPTER is not None and hasattr(ADAPTER, "enable") and hasattr(ADAPTER, "parse"):
    c.row(
        "adapter[parse]",
        ADAPTER.parse({"gradient_checkpointing": False})["gradient_checkpointing"] is False,
        "off stays off",
    )
    m.gradient_checkpointing_disable()
    m.requires_grad_(True)
    calls = [0]
    for layer in m.encoder.layers:
        layer.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def block_calls():
        calls[0] = 0
        m(torch.arange(8)[None]).last_hidden_state.mean().backward()
        return calls[0]

    ADAPTER.enable(m)
    on = block_calls()
    c.row("adapter on", on == 4, f"{ADAPTER.describe(m)}; {on} calls of 2 blocks in a step")
    ADAPTER.disable(m)
    off = block_calls()
    c.row("adapter off", off == 2, f"{off} calls of 2 blocks in a step")
c.end()
