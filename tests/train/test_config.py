"""The trainer's configuration: every mistake is one clear error, found before anything is loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.train.config import TrainConfig, TrainKeys, changes, load_config

MINIMAL = {"model_family": "flux1", "pretrained_model_name_or_path": "quickstart", "data_dir": "photos"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rat", 1, "unknown key 'learning_rat'. Did you mean 'learning_rate'?"),
        ("gradient_chekpointing_interval", 2, "Did you mean 'gradient_checkpointing_interval'?"),
        ("gradient_checkpointing_backend", "troch", "gradient_checkpointing_backend: 'troch' is not allowed"),
        ("gradient_checkpointing_backend", "automatic", "allowed: torch, torch-ffn, unsloth, unsloth-ffn"),
        ("gradient_checkpointing_offload_attention", "attn", "allowed: true or false"),
        ("gradient_checkpointing_offload_pin_memory_max_buckets", -1, "allowed: a whole number, 0 or more"),
        ("gradient_checkpointing_offload_min_bytes", "1 MiBi", "Did you mean 'MiB'?"),
        ("gradient_checkpointing_offload_atention", True, "Did you mean 'gradient_checkpointing_offload_attention'?"),
        ("gradient_checkpointing_interval", 0, "gradient_checkpointing_interval: 0 is not allowed"),
        ("gradient_checkpointing_segment_stride", 4, "gradient_checkpointing_interval"),
        ("max_train_steps", 0, "max_train_steps: 0 is not allowed; allowed: a whole number, 1 or more"),
        ("max_train_steps", 1.5, "max_train_steps: 1.5 is not allowed"),
        ("learning_rate", -1, "learning_rate: -1 is not allowed; allowed: a number, 0 or more"),
        ("learning_rate", "fast", "learning_rate: 'fast' is not allowed"),
        ("learning_rate", True, "learning_rate: True is not allowed"),
        ("learning_rate", "nan", "learning_rate: 'nan' is not allowed"),
        ("mixed_precision", "fp16", "mixed_precision: 'fp16' is not allowed; allowed: no, bf16"),
        ("on_out_of_memory", "escalade", "allowed: raise, escalate. Did you mean 'escalate'?"),
        ("optimizer", "torch-adam", "Did you mean 'torch-adamw'?"),
        ("model_type", "lokr", "model_type: 'lokr' is not allowed; allowed: lora, full"),
        ("lora_type", "lycoris", "lora_type: 'lycoris' is not allowed; allowed: standard"),
        ("model_family", "sd3", "model_family: this version trains flux1 only, not"),
        ("model_family", "flix", "model_family: unknown family 'flix'. Did you mean"),
        ("data_dir", 3, "data_dir: 3 is not allowed; allowed: path of a folder"),
        ("validation_disable", "maybe", "validation_disable: 'maybe' is not allowed; allowed: true or false"),
    ],
)
def test_a_mistake_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_flat({**MINIMAL, key: value})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("key", MINIMAL)
def test_required_keys(key: str) -> None:
    with pytest.raises(ConfigError, match=f"missing: {key}"):
        TrainConfig.from_flat({name: value for name, value in MINIMAL.items() if name != key})
    with pytest.raises(ConfigError, match=f"missing: {key}"):
        TrainConfig.from_flat({**MINIMAL, key: "none"})


def test_text_from_the_command_line_means_the_same_as_json() -> None:
    as_text = {"learning_rate": "1e-3", "lora_rank": "8", "lora_alpha": "none", "validation_disable": "Yes"}
    as_json = {"learning_rate": 1e-3, "lora_rank": 8, "lora_alpha": None, "validation_disable": True}
    controls = {"gradient_checkpointing_interval": "2", "gradient_checkpointing": "on"}
    real_controls = {"gradient_checkpointing_interval": 2, "gradient_checkpointing": True}
    assert TrainConfig.from_flat({**MINIMAL, **as_text, **controls}) == TrainConfig.from_flat(
        {**MINIMAL, **as_json, **real_controls}
    )


@pytest.mark.parametrize("name", ["flux", "Flux.1", "FLUX.1-dev", "flux1"])
def test_aliases_of_a_family(name: str) -> None:
    assert TrainConfig.from_flat({**MINIMAL, "model_family": name}).keys.model_family == "flux1"


def test_flat_dict_makes_the_same_configuration_again() -> None:
    config = TrainConfig.from_flat({**MINIMAL, "gradient_checkpointing": False, "resume_from_checkpoint": "false"})
    assert TrainConfig.from_flat(json.loads(json.dumps(config.as_flat_dict()))) == config


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default() -> None:
    config = TrainConfig.from_flat(MINIMAL)
    earlier = {key: value for key, value in config.record().items() if "offload" not in key}
    assert changes(earlier, config) == ""
    now = TrainConfig.from_flat({**MINIMAL, "gradient_checkpointing_offload_attention": True})
    assert changes(earlier, now) == "gradient_checkpointing_offload_attention False (now True)"


def test_input_paths_start_at_the_file_and_output_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "config.json"
    path.write_text(json.dumps({**MINIMAL, "output_dir": "out"}))
    monkeypatch.chdir(tmp_path)
    keys = load_config(Path("there/config.json")).keys
    assert keys.data == Path("there/photos")
    assert keys.makes_pipeline
    assert keys.output == Path("out")
    keys = load_config(path, ["data_dir=mine", "pretrained_model_name_or_path=./quickstart"]).keys
    assert keys.data == Path("mine")
    assert not keys.makes_pipeline
    assert keys.pipeline == Path("quickstart")


def test_overrides_win_and_are_checked(config_file: Callable[..., Path]) -> None:
    path = config_file(seed=1)
    config = load_config(path, ["seed=7", "gradient_checkpointing_backend=torch-ffn", "validation_prompt=a = b"])
    assert config.keys.seed == 7
    assert config.checkpointing.backend == "torch-ffn"
    assert config.keys.validation_prompt == "a = b"
    with pytest.raises(ConfigError, match="expected key=value"):
        load_config(path, ["seed"])
    with pytest.raises(ConfigError, match=r"config.json with --set: unknown key 'sead'. Did you mean 'seed'\?"):
        load_config(path, ["sead=7"])


@pytest.mark.parametrize(
    ("file", "override", "gone"),
    [
        (
            {"backend": "torch-ffn", "interval": 2, "segment_stride": 4, "offload_attention": False},
            ["schedule=plan.json"],
            {"interval": None, "segment_stride": None, "backend": "torch"},
        ),
        ({"backend": "auto"}, ["schedule=plan.json"], {"backend": "torch"}),
        ({"interval": 2, "offload_attention": True}, ["backend=auto"], {"interval": None, "offload_attention": False}),
        ({"schedule": "plan.json"}, ["backend=torch-ffn"], {"schedule": None}),
        ({"schedule": "plan.json"}, ["backend=auto"], {"schedule": None}),
        ({"interval": 2, "segment_stride": 4}, ["backend=AUTO"], {"interval": None, "segment_stride": None}),
    ],
)
def test_an_override_goes_over_what_cannot_stand_beside_it(
    config_file: Callable[..., Path], file: dict[str, Any], override: list[str], gone: dict[str, Any]
) -> None:
    path = config_file(**{f"gradient_checkpointing_{name}": value for name, value in file.items()})
    config = load_config(path, [f"gradient_checkpointing_{text}" for text in override]).checkpointing
    assert {name: getattr(config, name) for name in gone} == gone
    name, value = override[0].split("=")
    assert getattr(config, name) == value.lower()


def test_what_belongs_to_the_chosen_setting_stays(config_file: Callable[..., Path]) -> None:
    auto = config_file(gradient_checkpointing_backend="auto", vram_budget="16GiB")
    assert load_config(auto, ["gradient_checkpointing_backend=Auto"]).checkpointing.vram_budget == 2**34
    assert load_config(auto, ["gradient_checkpointing_backend=none"]).checkpointing.vram_budget is None
    off = ["gradient_checkpointing=false", "gradient_checkpointing_backend=torch"]
    assert not load_config(config_file(gradient_checkpointing_interval=2), off).checkpointing.gradient_checkpointing


def test_overrides_that_contradict_each_other(config_file: Callable[..., Path]) -> None:
    path = config_file()
    with pytest.raises(ConfigError, match=r"leave gradient_checkpointing_interval out \(null in a file"):
        load_config(path, ["gradient_checkpointing_backend=auto", "gradient_checkpointing_interval=2"])


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.json: there is no such file"):
        load_config(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json: is not JSON"):
        load_config(tmp_path / "broken.json")


@pytest.mark.parametrize("name", ["config.json", "your_model.json"])
def test_the_examples_are_valid(quickstart: Path, name: str) -> None:
    assert load_config(quickstart / name).keys.model_family == "flux1"


def test_every_key_is_explained() -> None:
    for name, field in TrainKeys.model_fields.items():
        assert field.description and re.fullmatch(r".*[.]", field.description), name


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    given = {"model_family": "flux1x", "lr": 1, "train_batch_size": 0, "gradient_checkpointing_interval": -1}
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_flat(given)
    told = str(caught.value).splitlines()
    begins = (
        "unknown key 'lr'",
        "missing: pretrained_model_name_or_path, data_dir",
        "model_family",
        "train_batch_size",
    )
    assert [line.startswith(begin) for line, begin in zip(told, begins, strict=False)] == [True] * 4
    assert told[4].startswith("gradient_checkpointing_interval") and len(told) == 5


@pytest.mark.parametrize("inside", [".", "runs", "runs/first"])
def test_samples_are_not_to_be_trained_on(tmp_path: Path, inside: str) -> None:
    (tmp_path / "photos").mkdir()
    path = tmp_path / "config.json"
    output = tmp_path / "photos" / inside
    path.write_text(json.dumps({**MINIMAL, "data_dir": "photos", "output_dir": str(output)}))
    with pytest.raises(ConfigError, match="is in data_dir, .*photos, where every picture is trained"):
        load_config(path, [])
    load_config(path, [f"output_dir={tmp_path / 'photos2'}"])
