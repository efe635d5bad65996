from transformers import CLIPTextConfig, CLIPTextModel

from _common import ADAPTER, Case, tiny_flux

c = Case(
    14,
    "enable_gradient_checkpointing vs gradient_checkpointing_enable: two names, easy to mix up",
    "huggingface/transformers PR#27020 (comments); cloneofsimo/lora#26",
    "one entry point takes diffusers models, transformers text encoders and PEFT-wrapped models alike",
)
te = CLIPTextModel(
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
fx = tiny_flux()
c.row(
    "stock transformers",
    hasattr(te, "enable_gradient_checkpointing") and hasattr(te, "gradient_checkpointing_enable"),
    "has both names",
)
c.row(
    "stock diffusers",
    hasattr(fx, "enable_gradient_checkpointing") and hasattr(fx, "gradient_checkpointing_enable"),
    "has both names",
)
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    from peft import LoraConfig, get_peft_model

    for n, mm in (
        ("transformers", te),
        ("diffusers", fx),
        ("peft-wrapped", get_peft_model(tiny_flux(), LoraConfig(target_modules=["to_q"]))),
    ):
        c.try_(f"adapter[{n}]", lambda mm=mm: (ADAPTER.enable(mm) is None or True, "enabled"))
c.end()
