"""PEFT around an attached model: adapters before and after attach, dropout, several adapters, merging, saving."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

import lowtide
from lowtide.errors import ConfigError
from tests.integration.models import assert_recomputed, assert_same, build, check, inputs, step

KEY = "flux1"


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v", "proj_mlp"], **options)


def adapted(model: Any, name: str = "default", **options: Any) -> Any:
    torch.manual_seed(3)  # the adapter's weights
    model.add_adapter(lora(**options), adapter_name=name)
    return model


def wrapped(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, lora(**options))


@pytest.mark.parametrize("prepare", [adapted, wrapped], ids=["add_adapter", "get_peft_model"])
@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}, {"use_dora": True}], ids=["lora", "dropout", "dora"])
def test_adapters_before_and_after_attach(prepare: Any, options: dict[str, Any]) -> None:
    check(lambda: build(KEY), lambda model: prepare(model, **options), KEY, interval=2)


def test_adapters_inside_feed_forward_sides() -> None:
    model = adapted(build(KEY), lora_dropout=0.5)
    expected = step(model, KEY)
    with lowtide.attach(model, backend="torch-ffn") as handle:
        assert_same(expected, step(model, KEY))
        assert not assert_recomputed(handle).warnings


def test_adapters_put_into_a_feed_forward_side_after_attach_are_reported() -> None:
    """An inline side is a chain of modules: the sum of layer and adapter, made between two of them, breaks it."""
    expected = step(adapted(build(KEY)), KEY)
    model = build(KEY)
    with lowtide.attach(model, backend="torch-ffn") as handle:
        adapted(model)
        assert_same(expected, step(model, KEY))
        receipt = handle.receipt()
    assert "4 modules (single_transformer_blocks.0.proj_mlp the first, now of class Linear)" in receipt.warnings[0]
    saved = {block.stack: block.recomputed_bytes for block in receipt.blocks}
    assert saved["transformer_blocks"] > 0 == saved["single_transformer_blocks"]


def test_dropout_is_drawn_anew_in_every_step_and_the_same_in_recomputation() -> None:
    expected = [step(adapted(build(KEY), lora_dropout=0.5), KEY, seed) for seed in (0, 1)]
    assert expected[0].loss != expected[1].loss
    with lowtide.attach(adapted(model := build(KEY), lora_dropout=0.5), interval=2) as handle:
        for seed in (0, 1, 0):
            assert_same(expected[seed], step(model, KEY, seed))
            assert_recomputed(handle, width=2)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_several_adapters_are_switched_between_steps() -> None:
    def two() -> Any:
        return adapted(adapted(build(KEY), "first"), "second", lora_dropout=0.5)

    names = ("first", "second", "first")
    reference = two()
    expected = []
    for name in names:
        reference.set_adapter(name)
        expected.append(step(reference, KEY))
    model = two()
    with lowtide.attach(model, interval=2) as handle:
        for name, plain in zip(names, expected, strict=True):
            model.set_adapter(name)
            assert_same(plain, step(model, KEY))
            assert_recomputed(handle, width=2)


def test_disabled_adapters_between_steps() -> None:
    model = adapted(build(KEY))
    expected = step(model, KEY)
    with torch.no_grad():
        base = build(KEY)(**inputs(KEY)).sample
    with lowtide.attach(model, interval=2) as handle:
        assert_same(expected, step(model, KEY))
        model.disable_adapters()
        with torch.no_grad():
            assert torch.equal(base, model(**inputs(KEY)).sample)
        model.enable_adapters()
        assert_same(expected, step(model, KEY))
        assert_recomputed(handle, width=2)


def test_merging_while_attached_gives_the_merged_model() -> None:
    reference = wrapped(build(KEY))
    step(reference, KEY)
    expected = reference.merge_and_unload()
    model = wrapped(build(KEY))
    with lowtide.attach(model, interval=2) as handle:
        step(model, KEY)
        assert_recomputed(handle, width=2)
        merged = model.merge_and_unload()
        for weight in merged.parameters():
            weight.requires_grad_()
        found = step(merged, KEY)
        assert_recomputed(handle, width=2)
    for weight in expected.parameters():
        weight.requires_grad_()
    assert_same(step(expected, KEY), found)
    assert list(merged.state_dict()) == list(build(KEY).state_dict())


def test_adapter_keys_are_those_of_an_unattached_model() -> None:
    expected = list(get_peft_model_state_dict(wrapped(build(KEY))))
    model = build(KEY)
    lowtide.attach(model, backend="torch-ffn")
    assert list(get_peft_model_state_dict(wrapped(model))) == expected


def test_a_second_attach_through_the_wrapper_is_refused() -> None:
    model = build(KEY)
    lowtide.attach(model)
    with pytest.raises(ConfigError, match="attached already"):
        lowtide.attach(wrapped(model))
