"""``lowtide inspect``: which blocks a setting keeps, recomputes and puts as one."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from lowtide import families
from lowtide.controls import BACKENDS, CheckpointConfig


def treatments(result: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(block["treatment"] for stack in result["stacks"] for block in stack["blocks"]))


def test_feed_forwards_of_all_57_flux_blocks(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "flux1", "--backend", "torch-ffn")
    assert treatments(result) == {"ffn": 57}
    assert result["parameters"] == 11_901_408_320
    assert result["scopes"] == list(BACKENDS)
    assert result["settings"] == CheckpointConfig(backend="torch-ffn").attach_arguments()


def test_segments_and_gaps(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "flux.1", "--interval", "2", "--segment-stride", "4")
    assert (result["model"], result["family"]) == ("Flux.1", "flux1")
    double, single = result["stacks"]
    assert (double["name"], double["depth"], double["found"]) == ("transformer_blocks", 19, False)
    assert [block["segment"] for block in double["blocks"]][:7] == [0, 0, None, None, 1, 1, None]
    assert double["blocks"][4] == {
        "name": "transformer_blocks.4",
        "index": 4,
        "treatment": "whole",
        "segment": 1,
        "reason": None,
        "moves": [],
    }
    assert treatments({"stacks": [single]}) == {"whole": 20, "kept": 18}


def test_no_backend_keeps_all(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "sana", "--size", "tiny", "--backend", "none")
    assert set(treatments(result)) == {"kept"}
    assert result["settings"]["backend"] is None


def test_blocks_without_a_feed_forward_say_so(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "sdxl", "--size", "tiny", "--backend", "torch-ffn")
    blocks = result["stacks"][0]["blocks"]
    resnets = [block for block in blocks if ".resnets." in block["name"]]
    assert resnets
    assert {(block["treatment"], block["reason"]) for block in resnets} == {("kept", "no feed-forward")}
    assert {block["treatment"] for block in blocks if block not in resnets} == {"ffn"}


def test_what_would_wait_in_cpu_memory(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "flux1", "--size", "tiny", "--backend", "unsloth-ffn", "--offload-attention")
    double, single = result["stacks"]
    moved = ("ffn+offload", ["attention", "boundary"])
    assert [(block["treatment"], block["moves"]) for block in double["blocks"]] == [moved] * double["depth"]
    last = ("ffn", [])  # runs last, so that backward asks for it at once
    assert [(b["treatment"], b["moves"]) for b in single["blocks"]] == [*[moved] * (single["depth"] - 1), last]
    assert result["settings"]["offload_attention"] is True
    assert result["settings"]["offload_min_bytes"] == 2**20


def test_attention_offload_alone_is_of_blocks_with_attention(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "sdxl", "--size", "tiny", "--backend", "none", "--offload-attention")
    *blocks, last = result["stacks"][0]["blocks"]
    assert {(block["treatment"], *block["moves"]) for block in blocks if ".resnets." in block["name"]} == {("kept",)}
    others = {(block["treatment"], *block["moves"]) for block in blocks if ".attentions." in block["name"]}
    assert others == {("kept+offload", "attention")}
    assert last["moves"] == []


def test_blocks_without_a_feed_forward_move_no_boundary(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("inspect", "sdxl", "--size", "tiny", "--backend", "unsloth-ffn")
    resnets = [block for block in result["stacks"][0]["blocks"] if ".resnets." in block["name"]]
    assert {(block["treatment"], *block["moves"], block["reason"]) for block in resnets} == {
        ("kept", "no feed-forward")
    }


def test_selective_segments(lowtide_json: Callable[..., Any]) -> None:
    options = ("--backend", "unsloth-selective", "--interval", "2", "--segment-stride", "3", "--size", "tiny")
    (stack,) = lowtide_json("inspect", "sd3_medium", *options)["stacks"]
    assert [block["treatment"] for block in stack["blocks"]][:3] == ["selective+offload"] * 2 + ["kept"]
    assert [block["segment"] for block in stack["blocks"]][:4] == [0, 0, None, 1]
    ends = stack["blocks"][-2:]
    assert [(block["treatment"], block["segment"]) for block in ends] == [("selective", 2)] * 2


def test_people_see_what_moves_and_the_setting_in_words(lowtide: Callable[..., Any]) -> None:
    options = ("--backend", "unsloth-ffn", "--offload-attention", "--offload-min-bytes", "64KiB", "--size", "tiny")
    rows = [" ".join(line.split()) for line in lowtide("inspect", "sd3_medium", *options).stdout.splitlines()]
    assert rows[1] == "With backend unsloth-ffn, offload attention, offload min bytes 65536:"
    assert any("ffn recomputed + offload (attention, boundary)" in row for row in rows)
    alone = lowtide("inspect", "sana", "--size", "tiny", "--backend", "none", "--offload-min-bytes", "0").stdout
    assert "With no backend (nothing is recomputed):" in alone


@pytest.mark.parametrize("family", [family.key for family in families.all_families()])
def test_people_see_every_stack_of_every_family(lowtide: Callable[..., Any], family: str) -> None:
    result = lowtide("inspect", family, "--interval", "2", "--size", "tiny")
    assert result.exit_code == 0, result.stderr
    for stack in families.find(family).stacks:
        assert stack.name in result.stdout
    assert "2 as one" in result.stdout
    assert "found by structure" not in result.stdout


def test_people_see_ranges(lowtide: Callable[..., Any]) -> None:
    lines = lowtide("inspect", "flux1", "--interval", "2", "--segment-stride", "4").stdout.splitlines()
    assert "With backend torch, interval 2, segment stride 4" in lines[1]
    rows = [" ".join(line.split()) for line in lines]
    assert "transformer_blocks 19 blocks" in rows
    assert "0-1, 4-5 … 16-17 (10) recomputed, 2 as one" in rows
    assert "2-3, 6-7 … 18 (9) kept" in rows


@pytest.fixture
def unknown_model(tmp_path: Path) -> Path:
    """The folder of a model of a class that no family describes."""
    model = diffusers.LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        caption_channels=16,
        video_length=2,
    )
    model.save_pretrained(tmp_path)
    return tmp_path


INPUTS = {
    "hidden_states": [1, 4, 2, 8, 8],
    "timestep": {"gen": "full", "shape": [1], "dtype": "int64", "value": 5},
    "encoder_hidden_states": [1, 4, 16],
}


def test_an_unknown_model_shows_what_was_found(
    lowtide: Callable[..., Any], lowtide_json: Callable[..., Any], unknown_model: Path
) -> None:
    result = lowtide_json("inspect", str(unknown_model), "--backend", "torch-ffn")
    assert result["family"] is None
    assert result["class"] == "diffusers.LatteTransformer3DModel"
    assert [(stack["name"], stack["depth"], stack["found"], stack["certainty"]) for stack in result["stacks"]] == [
        ("transformer_blocks", 2, True, "structure"),
        ("temporal_transformer_blocks", 2, True, "structure"),
    ]
    assert treatments(result) == {"ffn": 4}
    text = " ".join(lowtide("inspect", str(unknown_model)).stdout.split())
    assert "No family describes this class: its block stacks were found by structure." in text
    assert "structure: 2 composite modules of like kind (BasicTransformerBlock) stand together" in text
    assert "With --inputs a forward is run that confirms this" in text
    assert "feed-forward: norm2, ff" in text


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_forward_confirms_what_was_found(
    lowtide: Callable[..., Any], lowtide_json: Callable[..., Any], unknown_model: Path, device: str
) -> None:
    file = unknown_model / "inputs.json"
    file.write_text(json.dumps(INPUTS), encoding="utf-8")
    result = lowtide_json("inspect", str(unknown_model), "--inputs", str(file), "--device", device)
    for stack, other in zip(result["stacks"], result["stacks"][::-1], strict=True):
        assert stack["certainty"] == "structure and forward"
        assert stack["why"] == [
            "its 2 blocks were called once each, in this order",
            f"in turn with {other['name']}",
            "1 of 1 were handed what the model made in between: segments end there",
        ]
        assert {side["certainty"] for side in stack["sides"].values()} == {"structure and forward"}
    assert result["stacks"][0]["sides"]["attn1"]["why"] == ["an attention kernel was called in it"]
    text = lowtide("inspect", str(unknown_model), "--inputs", json.dumps(INPUTS)).stdout
    assert "structure and forward: its 2 blocks were called once each" in text
    assert "With --inputs" not in text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("nowhere.json", "cannot read the inputs"),
        ("{", "cannot read the inputs"),
        ('{"hidden_state": [1, 4, 2, 8, 8]}', "unexpected keyword argument 'hidden_state'"),
        ('{"hidden_states": [1, 4, 2, 8]}', "LatteTransformer3DModel failed with these inputs (hidden_states)"),
    ],
)
def test_wrong_inputs(lowtide: Callable[..., Any], unknown_model: Path, inputs: str, message: str) -> None:
    result = lowtide("inspect", str(unknown_model), "--inputs", inputs)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_family_needs_no_inputs(lowtide: Callable[..., Any]) -> None:
    result = lowtide("inspect", "sana", "--size", "tiny", "--inputs", "{}")
    assert result.exit_code == 2
    assert "declared by its family" in result.stderr


@pytest.mark.parametrize(
    ("family", "options", "reasons"),
    [
        ("flux1", (), ["attention is recomputed"]),
        ("flux1", ("--backend", "none"), []),
        ("flux1", ("--backend", "torch-ffn"), []),
        (
            "flux1",
            ("--backend", "unsloth-selective"),
            ["the outputs of the attention kernels wait in CPU memory already"],
        ),
        ("flux1", ("--interval", "1", "--segment-stride", "2"), ["attention is recomputed in 7 of 14 blocks"]),
        ("sdxl", ("--backend", "none"), ["17 of 63 blocks have no softmax attention"]),
        ("sdxl", (), ["attention is recomputed"]),
    ],
)
def test_where_attention_offload_moves_nothing(
    lowtide: Callable[..., Any],
    lowtide_json: Callable[..., Any],
    family: str,
    options: tuple[str, ...],
    reasons: list[str],
) -> None:
    arguments = ("inspect", family, "--size", "tiny", "--offload-attention", *options)
    notes = lowtide_json(*arguments)["inert"]
    assert notes == [{"option": "offload_attention", "reason": reason} for reason in reasons]
    text = " ".join(lowtide(*arguments).stdout.split())
    assert all(f"inert: offload_attention: {reason}" in text for reason in reasons)


def test_what_runs_last_says_that_it_stays(lowtide_json: Callable[..., Any]) -> None:
    (stack,) = lowtide_json("inspect", "sana", "--size", "tiny", "--backend", "unsloth")["stacks"]
    assert [block["reason"] for block in stack["blocks"]] == [None] * 7 + ["runs last, stays on the device"]


def test_an_unknown_model_cannot_be_verified(lowtide: Callable[..., Any], unknown_model: Path) -> None:
    result = lowtide("verify", str(unknown_model))
    assert result.exit_code == 2
    assert "LatteTransformer3DModel, which no family describes" in " ".join(result.stderr.split())


def test_the_scope_that_a_model_does_not_have(lowtide: Callable[..., Any], tmp_path: Path) -> None:
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=2,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )
    unet.save_config(tmp_path)
    result = lowtide("inspect", str(tmp_path), "--backend", "torch-ffn")
    assert result.exit_code == 2
    assert "recomputes feed-forward sides" in result.stderr
    assert "Backends that it can run: torch, unsloth." in result.stderr
    for options in (("--backend", "torch-selective"), ("--backend", "none", "--offload-attention")):
        result = lowtide("inspect", str(tmp_path), *options)
        assert result.exit_code == 2
        assert "softmax attention" in result.stderr
        assert "Backends that it can run: torch, unsloth." in result.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_backend_that_is_none_names_those_that_can_be_shown(lowtide: Callable[..., Any], command: str) -> None:
    result = lowtide(command, "flux1", "--backend", "torchh")
    told = f"error: backend: 'torchh' is not allowed; allowed: {', '.join(BACKENDS)}. Did you mean 'torch'?"
    assert result.exit_code == 2 and told in " ".join(result.stderr.split())
    result = lowtide(command, "flux1", "--backend", "Auto")
    assert result.exit_code == 2 and "`lowtide plan` shows what it would choose" in " ".join(result.stderr.split())


def test_a_size_is_no_choice_for_a_folder(lowtide: Callable[..., Any], unknown_model: Path) -> None:
    result = lowtide("inspect", str(unknown_model), "--size", "tiny")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--size chooses a configuration of a family" in " ".join(result.stderr.split())


def test_a_pipeline_folder_is_known_by_its_class(lowtide_json: Callable[..., Any], tmp_path: Path) -> None:
    row = families.find("sana")
    model = diffusers.SanaTransformer2DModel(**row.tiny.config)
    model.save_config(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "SanaTransformer2DModel"]}))
    result = lowtide_json("inspect", str(tmp_path))
    assert result["family"] == "sana"
    assert result["stacks"][0]["found"] is False
