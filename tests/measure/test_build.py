"""Building models of the families and loading them from folders."""

import json
import sys

import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.measure.build import build_model, family_of, load_model, open_target

ROWS = families.all_families()
by_key = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A pipeline folder with a tiny Flux.1 transformer, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("pipeline")
    build_model(families.find("flux1"), seed=5).save_pretrained(folder / "transformer")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@by_key
def test_a_tiny_model_is_made_by_its_seed_and_leaves_the_random_state_alone(row):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = build_model(row), build_model(row)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build_model(row, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first.training is row.train_mode


@by_key
def test_a_tiny_model_has_no_weight_that_is_all_zero(row):
    zero = [name for name, weight in build_model(row).named_parameters() if not weight.any()]
    assert [name for name in zero if not name.endswith("bias")] == []


def test_the_meta_device_takes_no_memory():
    model = build_model(families.find("wan21_14b"), "real", device="meta", dtype=torch.bfloat16)
    assert all(weight.is_meta for weight in model.parameters())


def test_a_dtype_spares_what_the_class_keeps_in_float32():
    model = build_model(families.find("wan"), dtype=torch.bfloat16)
    assert model.get_parameter("blocks.0.scale_shift_table").dtype is torch.float32
    assert model.get_parameter("blocks.0.attn1.to_q.weight").dtype is torch.bfloat16


def test_an_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="allowed: tiny, real"):
        build_model(families.find("sana"), "huge")  # pyright: ignore[reportArgumentType]


def test_without_diffusers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        ConfigError, match=r"FluxTransformer2DModel needs diffusers.*pip install 'lowtide\[diffusers\]'"
    ):
        build_model(families.find("flux1"))


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_pipeline_folder_and_a_model_folder_give_the_saved_model(pipeline, inside):
    model = load_model(pipeline / inside)
    saved = build_model(families.find("flux1"), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_the_meta_device_needs_no_weights(pipeline, tmp_path):
    config = (pipeline / "transformer" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    model = load_model(tmp_path, device="meta")
    assert all(weight.is_meta for weight in model.parameters())


def test_a_folder_target_knows_its_family_and_fitting_inputs(pipeline):
    target = open_target(pipeline)
    assert target.family is families.find("flux1")
    assert target.model(**target.inputs()).sample.shape == (2, 16, 4)


def test_a_folder_may_have_the_inputs_of_the_real_row(pipeline):
    target = open_target(pipeline, device="meta", folder_inputs="real")
    given = target.inputs(device="meta")
    assert given["hidden_states"].shape == (1, 4096, 4)  # 1024 pixels; the channels are the folder's
    assert given["encoder_hidden_states"].shape[:2] == (1, 512)


def test_a_name_target_is_the_family_in_that_size():
    target = open_target("Flux.1", "real", device="meta")
    assert target.label == "Flux.1"
    assert target.inputs(device="meta")["hidden_states"].shape == (1, 4096, 64)


def test_of_families_that_share_a_class_the_nearest_size_is_taken():
    assert family_of(build_model(families.find("wan21_14b"), "real", device="meta")) is families.find("wan21_14b")
    assert family_of(build_model(families.find("wan21_1_3b"), "real", device="meta")) is families.find("wan21_1_3b")
    assert family_of(nn.Linear(1, 1)) is None


def test_a_model_without_a_family_opens_but_has_no_inputs(tmp_path):
    from diffusers import AutoencoderTiny

    AutoencoderTiny().save_pretrained(tmp_path)
    target = open_target(tmp_path)
    assert target.family is None
    with pytest.raises(ConfigError, match="AutoencoderTiny, which no family describes"):
        target.inputs()


@pytest.mark.parametrize("name", ["/nowhere", "models/nowhere", "./flux1"])
def test_a_missing_folder_says_what_was_expected(name):
    with pytest.raises(ConfigError, match=r"no model folder at .*model_index\.json"):
        open_target(name)


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_not_the_folder_one_is_in(name):
    with pytest.raises(ConfigError, match="no model is named. Expected the name of a family"):
        open_target(name)


def test_a_word_that_is_neither_family_nor_folder():
    with pytest.raises(ConfigError, match=r"Did you mean flux1.*no folder of that name"):
        open_target("flux11")


def _write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"neither model_index\.json nor config\.json"),
        ({"model_index": "{"}, "cannot read"),
        ({"model_index": "[]"}, "must hold a JSON object, holds a list"),
        ({"model_index": "{}"}, "no transformer or unet folder"),
        ({"config": '{"layers": 3}'}, "has no _class_name"),
        ({"config": '{"_class_name": "NoSuchModel"}'}, "has no NoSuchModel"),
        ({"config": '{"_class_name": "FluxTransformer2DModel"}'}, "cannot load FluxTransformer2DModel"),
    ],
)
def test_an_odd_folder_is_one_clear_error(tmp_path, files, message):
    _write(tmp_path, **files)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_weights_that_cannot_be_read_are_one_clear_error(pipeline, tmp_path):
    (tmp_path / "config.json").write_text((pipeline / "transformer" / "config.json").read_text())
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ConfigError, match="cannot load FluxTransformer2DModel"):
        load_model(tmp_path)


def test_a_configuration_that_the_class_refuses_is_one_clear_error(tmp_path):
    _write(tmp_path, config='{"_class_name": "FluxTransformer2DModel", "num_layers": "many"}')
    with pytest.raises(ConfigError, match="cannot load FluxTransformer2DModel"):
        load_model(tmp_path, device="meta")
