"""Trained weights by name: clean ones out, and nothing but an exact match in. Public bug cases 91 and 92."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ConfigError
from lowtide.measure.cards import find_card
from lowtide.measure.planning import Wish, plan_for
from lowtide.train.adapters import Everything, Lora, clean_name, lora_weights, set_lora_weights
from lowtide.train.prepare import Prepared

CPU = torch.device("cpu")


def add_lora(prepared: Prepared, rank: int = 4) -> Lora:
    denoiser = prepared.row.open_denoiser(prepared.config.keys.pipeline, CPU, torch.float32)
    return Lora(denoiser, prepared.row.lora_targets, rank, alpha=None)


def compile_in_place(model: nn.Module) -> None:
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")  # type: ignore[union-attr]


def wrap_blocks(model: nn.Module) -> None:
    for index, block in enumerate(model.transformer_blocks):  # type: ignore[arg-type]
        model.transformer_blocks[index] = torch.compile(block, backend="eager")  # type: ignore[index, operator]


@pytest.mark.parametrize("compiled", [compile_in_place, wrap_blocks])
def test_names_are_clean_whatever_wraps_the_blocks(prepared: Prepared, compiled: Callable[[nn.Module], None]) -> None:
    lora = add_lora(prepared)
    plain = lora_weights(lora.denoiser.model)
    compiled(lora.denoiser.model)
    assert lora_weights(lora.denoiser.model).keys() == plain.keys()
    changed = {name: torch.randn_like(tensor) for name, tensor in plain.items()}
    set_lora_weights(lora.denoiser.model, changed)
    back = lora_weights(lora.denoiser.model)
    assert all(torch.equal(back[name], tensor) for name, tensor in changed.items())


def test_names_of_ddp_and_checkpoint_wrappers() -> None:
    assert clean_name("module.a._orig_mod.b.0._checkpoint_wrapped_module.weight") == "a.b.0.weight"
    assert clean_name("blocks.module.weight") == "blocks.module.weight"


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"transformer.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("transformer_blocks.0.", "transformer_blocks.0._orig_mod."),
        lambda name: "lora_unet_" + name.replace(".", "_"),
    ],
)
def test_other_names_are_refused_with_examples_of_both_sides(prepared: Prepared, rename: Callable[[str], str]) -> None:
    lora = add_lora(prepared)
    before = lora_weights(lora.denoiser.model)
    given = {rename(name): tensor + 1 for name, tensor in before.items()}
    with pytest.raises(ConfigError, match=r"\d+ of the \d+ tensors .* Only in the model: .+\. Only in the file: .+"):
        set_lora_weights(lora.denoiser.model, given)
    after = lora_weights(lora.denoiser.model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_part_of_the_names_is_refused(prepared: Prepared) -> None:
    lora = add_lora(prepared)
    weights = lora_weights(lora.denoiser.model)
    weights.pop(next(iter(weights)))
    with pytest.raises(ConfigError, match=f"{len(weights)} of the {len(weights) + 1} tensors"):
        set_lora_weights(lora.denoiser.model, weights)


def test_another_rank_is_refused(prepared: Prepared) -> None:
    with pytest.raises(ConfigError, match="another lora_rank"):
        set_lora_weights(add_lora(prepared, 4).denoiser.model, lora_weights(add_lora(prepared, 2).denoiser.model))


def test_only_the_lora_is_trained_in_float32(prepared: Prepared) -> None:
    denoiser = prepared.row.open_denoiser(prepared.config.keys.pipeline, CPU, torch.bfloat16)
    lora = Lora(denoiser, prepared.row.lora_targets, 4, alpha=None)
    names = {name for name, parameter in denoiser.model.named_parameters() if parameter.requires_grad}
    assert names and all("lora_" in name for name in names)
    assert {parameter.dtype for parameter in lora.parameters} == {torch.float32}
    assert denoiser.model.x_embedder.weight.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_a_lora_without_a_place_is_an_error(prepared: Prepared) -> None:
    denoiser = prepared.row.open_denoiser(prepared.config.keys.pipeline, CPU, torch.float32)
    with pytest.raises(ConfigError, match="no place for a LoRA in FluxTransformer2DModel"):
        Lora(denoiser, "nothing_like_this", 4, alpha=None)


def test_everything_is_trained_in_float32(prepared: Prepared) -> None:
    denoiser = prepared.row.open_denoiser(prepared.config.keys.pipeline, CPU, torch.bfloat16)
    trained: list[Tensor] = list(Everything(denoiser).parameters)
    assert len(trained) == len(list(denoiser.model.parameters()))
    assert {parameter.dtype for parameter in trained} == {torch.float32}


def test_a_plan_is_for_the_lora_that_is_trained(prepared: Prepared) -> None:
    trained = sum(weight.numel() for weight in add_lora(prepared).parameters)
    wish = Wish(str(prepared.config.keys.pipeline), 2**40, find_card("RTX 4090"), rank=4)
    assert plan_for(wish, fits=False).trained == trained
