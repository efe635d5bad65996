"""``lowtide verify``: the proof, its exit code, and that it can fail."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.attaching import attach
from lowtide.measure.build import build_model


@pytest.mark.parametrize(
    ("family", "options", "treatments", "settings"),
    [
        ("flux1", (), {"whole"}, ("torch", None, None)),
        ("sd3 medium", ("--backend", "torch-selective"), {"selective"}, ("torch-selective", None, None)),
        ("flux1", ("--interval", "2", "--segment-stride", "4"), {"whole", "kept"}, ("torch", 2, 4)),
        ("flux1", ("--backend", "torch-ffn"), {"ffn"}, ("torch-ffn", None, None)),
        ("z-image turbo", ("--backend", "none"), {"kept"}, (None, None, None)),
    ],
)
def test_families_are_bit_identical(
    lowtide_json: Callable[..., Any],
    family: str,
    options: tuple[str, ...],
    treatments: set[str],
    settings: tuple[Any, ...],
) -> None:
    result = lowtide_json("verify", family, *options)
    assert result["same"] is True
    assert result["differences"] == []
    assert result["gradients"] > 0
    assert tuple(result["settings"].values())[:3] == settings
    assert result["offload"] is None
    assert {block["treatment"] for block in result["receipt"]["blocks"]} == treatments
    recomputed = sum(block["treatment"] != "kept" for block in result["receipt"]["blocks"])
    assert result["receipt"]["totals"]["recompute_calls"] == recomputed


@pytest.mark.parametrize(
    ("family", "options", "treatments"),
    [
        ("flux1", ("--backend", "unsloth"), {"whole+offload", "whole"}),
        ("flux1", ("--backend", "unsloth-ffn", "--offload-attention"), {"ffn+offload", "ffn"}),
        ("sdxl", ("--backend", "none", "--offload-attention"), {"kept+offload", "kept"}),
        ("wan21_1_3b", ("--backend", "unsloth-selective", "--interval", "2"), {"selective+offload", "selective"}),
        (
            "sd3_medium",
            ("--backend", "torch", "--interval", "1", "--segment-stride", "2", "--offload-attention"),
            {"whole", "kept+offload", "kept"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_offload_is_simulated_and_changes_no_number(
    lowtide_json: Callable[..., Any], family: str, options: tuple[str, ...], treatments: set[str]
) -> None:
    result = lowtide_json("verify", family, *options)
    assert (result["same"], result["offload"]) == (True, "simulated on the CPU")
    receipt = result["receipt"]
    assert {block["treatment"] for block in receipt["blocks"]} == treatments
    moved = {block["treatment"] for block in receipt["blocks"] if block["cpu_bytes"]}
    assert moved == {treatment for treatment in treatments if treatment.endswith("+offload")}
    assert receipt["totals"]["d2h_bytes"] == receipt["totals"]["cpu_bytes"] > 0
    assert receipt["totals"]["pool"]["in_use_bytes"] == 0


def test_small_tensors_stay_where_a_size_is_given(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("verify", "flux1", "--backend", "unsloth", "--offload-min-bytes", "1 GiB")
    assert result["settings"]["offload_min_bytes"] == 2**30
    assert result["receipt"]["totals"]["d2h_bytes"] == 0
    assert result["receipt"]["inert"]
    assert result["offload"] is None


def test_where_nothing_moves_nothing_is_called_simulated(lowtide: Callable[..., Any]) -> None:
    result = lowtide("verify", "sd3_medium", "--offload-attention")
    assert result.exit_code == 0
    assert "simulated" not in result.stdout
    assert "inert: offload_attention: attention is recomputed" in result.stdout


def test_people_are_told_that_offload_is_simulated(lowtide: Callable[..., Any]) -> None:
    rows = [
        " ".join(line.split()) for line in lowtide("verify", "sd3_medium", "--backend", "unsloth").stdout.splitlines()
    ]
    assert "Offload simulated on the CPU: copies were made synchronously, within CPU memory." in rows
    assert "blocks treatment replays kept on CPU dropped" in rows
    assert any(row.startswith("copies: ") for row in rows)
    plain = lowtide("verify", "sd3_medium").stdout
    assert "Offload" not in plain
    assert "on CPU" not in plain


def test_outside_of_verify_the_library_still_refuses_offload_without_an_accelerator(
    lowtide_json: Callable[..., Any],
) -> None:
    lowtide_json("verify", "sd3_medium", "--backend", "unsloth")
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="offload needs an accelerator"):
            attach(build_model(families.find("sd3_medium"), "tiny"), backend="unsloth")


def test_people_see_the_comparison_and_the_receipt(lowtide: Callable[..., Any]) -> None:
    result = lowtide("verify", "flux1", "--interval", "2", "--segment-stride", "4")
    assert result.exit_code == 0, result.stderr
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "outputs bit-identical" in rows
    assert "gradients 324 of 324 bit-identical" in rows
    assert any(row.startswith("0-1, 4-5 (4) recomputed, 2 as one 4 ") for row in rows)
    assert any(row.startswith("2-3 (2) kept 0 ") for row in rows)
    assert rows[-1] == "Same: loss, outputs and every gradient are bit-identical to a plain step."


@pytest.fixture
def a_model_that_drifts() -> Iterator[None]:
    """Every call of an output norm gives something a little larger than the call before."""
    calls = itertools.count(1)

    def grow(module: nn.Module, args: Any, output: Any) -> Any:
        return output * next(calls) if type(module).__name__ == "AdaLayerNormContinuous" else None

    handle = torch.nn.modules.module.register_module_forward_hook(grow)
    yield
    handle.remove()


@pytest.mark.usefixtures("a_model_that_drifts")
def test_a_difference_is_named_and_fails(lowtide: Callable[..., Any]) -> None:
    result = lowtide("verify", "flux1", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["same"] is False
    named = {difference["tensor"] for difference in report["differences"]}
    assert {"loss", "output 0", "gradient of x_embedder.weight"} <= named
    assert all(difference["max_abs"] > 0 for difference in report["differences"])


@pytest.mark.usefixtures("a_model_that_drifts")
def test_people_see_where_it_differs(lowtide: Callable[..., Any]) -> None:
    result = lowtide("verify", "flux1")
    assert result.exit_code == 1
    assert "Different:" in result.stdout
    assert "differs by up to" in result.stdout


def test_a_plan_for_the_real_model_is_none_for_the_tiny_one(lowtide: Callable[..., Any], tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    options = ("--no-fits", "--budget", "8GiB", "--card", "4090", "--host-memory", "0")
    assert lowtide("plan", "sd3", *options, "--save", str(path)).exit_code == 0
    done = lowtide("verify", "sd3", "--plan", str(path))
    assert done.exit_code == 2
    told = " ".join(done.stderr.split())
    assert "sd3 is verified in its tiny configuration. Give the folder of the model" in told
    assert "`lowtide inspect sd3 --plan`" in told


def test_the_model_of_a_folder(lowtide_json: Callable[..., Any], tmp_path: Any) -> None:
    config = {**families.find("sana").tiny.config, "num_layers": 3}
    diffusers.SanaTransformer2DModel(**config).save_pretrained(tmp_path)
    result = lowtide_json("verify", str(tmp_path), "--interval", "2")
    assert result["same"] is True
    assert (result["family"], result["model"]) == ("sana", str(tmp_path))
    assert [block["segment"] is not None for block in result["receipt"]["blocks"]] == [True] * 3
