"""transformers models, which no family row knows: stacks found by structure, caches that keep a block."""

from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel
from transformers.models.llama.modeling_llama import LlamaMLP

import lowtide
from lowtide.measure.parity import StepResult, run_step
from tests.integration.models import assert_recomputed, assert_same

TOKENS = torch.arange(24).view(2, 12)


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def t5() -> Any:
    return T5EncoderModel(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4))


def clip() -> Any:
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    return CLIPTextModel(config)


def built(make: Any) -> Any:
    torch.manual_seed(0)
    return make().train()


def step(model: Any, **options: Any) -> StepResult:
    return run_step(model, {"input_ids": TOKENS, **options})


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("make", [llama, t5, clip])
def test_text_models_are_recomputed_with_equal_gradients(make: Any, interval: int) -> None:
    options = {"use_cache": False} if make is llama else {}
    model = built(make)
    expected = step(model, **options)
    with lowtide.attach(model, interval=interval) as handle:
        for _ in range(2):
            assert_same(expected, step(model, **options))
            assert_recomputed(handle, width=interval)


def test_a_key_value_cache_keeps_the_blocks_and_the_receipt_says_why() -> None:
    model = built(llama)
    expected = step(model, use_cache=True)
    with lowtide.attach(model, interval=2) as handle:
        found = step(model, use_cache=True)
        receipt = handle.receipt()
    assert_same(expected, found)
    assert {block.treatment for block in receipt.blocks} == {"kept"}
    assert [note.subject for note in receipt.fallbacks] == [block.name for block in receipt.blocks]
    assert all("DynamicCache" in note.reason for note in receipt.fallbacks)


def test_their_own_checkpointing_inside_attached_blocks_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    expected = step(model, use_cache=False)
    model.activation_checkpointing_enable()
    calls = 0
    original = LlamaMLP.forward

    def counted(self: LlamaMLP, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *args)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    with lowtide.attach(model) as handle:
        assert_same(expected, step(model, use_cache=False))
        calls_of_the_step, receipt = calls, handle.receipt()
    model.activation_checkpointing_disable()
    with lowtide.attach(model) as handle:
        assert_same(expected, step(model, use_cache=False))
        assert_recomputed(handle)
    assert calls_of_the_step == 2 * len(receipt.blocks), (
        "once in forward, once in their recomputation; ours stops where theirs begins"
    )
    assert receipt.totals["recomputed_bytes"] == 0
    assert any("own gradient checkpointing" in warning for warning in receipt.warnings)


def test_hidden_states_are_captured_in_the_forward_only() -> None:
    model = built(llama)
    expected = step(model, use_cache=False, output_hidden_states=True)
    assert len(expected.outputs) > 4
    with lowtide.attach(model, interval=2) as handle:
        assert_same(expected, step(model, use_cache=False, output_hidden_states=True))
        assert_recomputed(handle, width=2)
