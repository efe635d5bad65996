"""``lowtide bench synthetic`` and ``family``, in tiny sizes: lines, what is skipped, words and exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.bench.modes import MODES
from lowtide.bench.record import Record, read
from lowtide.cli.app import app
from lowtide.cli.bench import mode_names

TINY = ("--size", "tiny", "--warm-up", "1", "--steps", "2")


@pytest.fixture
def bench() -> Callable[..., Any]:
    """Runs ``lowtide bench …`` in this process; cells run in theirs."""
    arguments = {"env": {"COLUMNS": "200"}}
    return lambda *words: CliRunner().invoke(app, ["bench", *map(str, words)], **arguments)


def cells(path: Path) -> list[Record]:
    return list(read(path))


def test_tiny_shapes_are_all_the_same_so_one_is_enough(bench: Callable[..., Any], tmp_path: Path) -> None:
    done = bench("synthetic", "--out", tmp_path, "--modes", "none", "--adapter", "lora", *TINY)
    assert done.exit_code == 0, done.stderr
    assert [record.condition.work for record in cells(tmp_path / "synthetic.jsonl")] == ["16x1024"]


def test_synthetic_cells_are_appended_and_finished_ones_skipped(bench: Callable[..., Any], tmp_path: Path) -> None:
    words = ("synthetic", "--out", tmp_path, "--work", "16x1024", "--modes", "none,layer", "--adapter", "lora", *TINY)
    first = bench(*words)
    assert first.exit_code == 0, first.stderr
    assert f"2 cells run, 2 with figures. `lowtide bench report {tmp_path}` shows all." in " ".join(
        first.stdout.split()
    )
    assert "1/2 16x1024, none, lora, bf16: " in first.stderr and "2/2 16x1024, layer, lora, bf16: " in first.stderr
    made = cells(tmp_path / "synthetic.jsonl")
    assert [(record.condition.mode, record.state) for record in made] == [("none", "ok"), ("layer", "ok")]
    for record in made:
        assert record.figures is not None and record.figures.warm_up_steps == 1
        assert len(record.figures.step_times_s) == 2
        assert record.condition.attention == "flash"
        assert record.machine["card"] is None and record.machine["torch"] == torch.__version__
    assert [record.receipt and record.receipt["blocks"] for record in made] == [None, {"whole": 6}]

    second = bench(*words)
    assert second.exit_code == 0, second.stderr
    assert second.stdout.startswith("Every cell was measured before; --again runs them once more.")
    assert len(cells(tmp_path / "synthetic.jsonl")) == 2

    third = bench(*words, "--again")
    assert third.exit_code == 0, third.stderr
    assert [record.condition.mode for record in cells(tmp_path / "synthetic.jsonl")] == ["none", "layer"] * 2


def test_family_cells_and_what_was_inert(bench: Callable[..., Any], tmp_path: Path) -> None:
    words = ("family", "SD3", "--out", tmp_path, "--modes", "layer, layer-offload", "--set", "B=1", *TINY)
    result = bench(*words)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith(("1/", "2/"))]
    assert lines[0].startswith("1/2 sd3_medium, layer, lora, bf16: ") and "INERT" not in lines[0]
    assert lines[1].startswith("2/2 sd3_medium, layer-offload, lora, bf16: ")
    assert lines[1].endswith("INERT: offload_attention: attention is recomputed")
    made = cells(tmp_path / "family.jsonl")
    assert [record.inert for record in made] == [[], ["offload_attention: attention is recomputed"]]
    assert {record.condition.sizes["B"] for record in made} == {1}
    assert {record.condition.rank for record in made} == {16}


def test_another_size_is_another_cell(bench: Callable[..., Any], tmp_path: Path) -> None:
    for batch in ("B=1", "B=3"):
        result = bench("family", "sd3", "--out", tmp_path, "--modes", "none", "--set", batch, *TINY)
        assert "1 cell run, 1 with figures." in result.stdout, result.stderr
    assert [record.condition.sizes["B"] for record in cells(tmp_path / "family.jsonl")] == [1, 3]


def test_a_cell_without_figures_says_its_state(bench: Callable[..., Any], tmp_path: Path) -> None:
    words = ("family", "sd3", "--out", tmp_path, "--modes", "none", "--attention", "cudnn", *TINY)
    result = bench(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("1 cell run, 0 with figures.")
    assert "sd3_medium, none, lora, bf16: failed: RuntimeError: No viable backend" in result.stderr
    assert "1 cell run" in bench(*words).stdout, "what failed runs again"
    assert [record.state for record in cells(tmp_path / "family.jsonl")] == ["failed", "failed"]


def test_each_budget_is_a_cell_of_auto(bench: Callable[..., Any], tmp_path: Path) -> None:
    words = ("family", "flux1", "--out", tmp_path, "--modes", "auto,none", *TINY)
    first = bench(*words, "--vram-budget", "1MiB, 16GiB")
    assert first.exit_code == 0, first.stderr
    assert "3 cells run, 2 with figures." in first.stdout
    lines = [line for line in first.stderr.splitlines() if line.startswith(("1/3", "2/3", "3/3"))]
    assert lines[0].startswith("1/3 flux1, auto (1 MiB), lora, bf16: unsupported: no schedule fits in 1.00 MiB")
    assert lines[1].startswith("2/3 flux1, auto (16 GiB), lora, bf16: 0.")
    assert lines[2].startswith("3/3 flux1, none, lora, bf16: 0.")
    made = cells(tmp_path / "family.jsonl")
    assert [record.condition.vram_budget for record in made] == [2**20, 2**34, None]
    assert made[1].receipt is not None and made[1].receipt["plan"]["budget_bytes"] == 2**34
    assert bench(*words, "--vram-budget", "16GiB,1024KiB").stdout.startswith("Every cell was measured before")


def test_all_modes_are_those_without_a_budget_unless_one_is_given() -> None:
    assert mode_names("all", budgeted=False) == [mode for mode in MODES if mode != "auto"]
    assert mode_names(" all", budgeted=True) == list(MODES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("family", "flux9"), "unknown family 'flux9'. Did you mean flux"),
        (("family", "flux1", "--modes", "layers"), "unknown mode 'layers'; allowed: none, torch-checkpoint, diffusers"),
        (("family", "flux1", "--modes", "lyer"), "Did you mean 'layer'?"),
        (("synthetic", "--modes", "none,auto2"), "unknown mode 'auto2'; allowed: none"),
        (("synthetic", "--work", "16by4"), "work '16by4' is not allowed; expected BLOCKSxTOKENS, as in 16x4096"),
        (("synthetic", "--adapter", "lora,lokr"), "adapter 'lokr' is not allowed; allowed: frozen, lora, full"),
        (("family", "flux1", "--adapter", "frozen"), "adapter 'frozen' is not allowed; allowed: lora, full"),
        (("family", "flux1", "--set", "B=0"), "--set 'B=0' is not allowed; expected NAME=N with a whole number from 1"),
        (("family", "flux1", "--set", "B"), "--set 'B' is not allowed"),
        (("family", "flux1", "--set", "Q=2"), "unknown size Q; this family has: B (batch), H (height), W"),
        (("family", "flux1", "--precision", "int4"), "precision 'int4' is not allowed; allowed: bf16, int8-sdnq"),
        (("family", "flux1", "--compile", "all"), "compile 'all' is not allowed; allowed: off, regional"),
        (("family", "flux1", "--attention", "xformers"), "attention 'xformers' is not allowed; allowed: default"),
        (("family", "flux1", "--size", "small"), "size 'small' is not allowed; allowed: real, tiny"),
        (("family", "flux1", "--largest", "big"), "--largest 'big' is not allowed; expected a number of parameters"),
        (("family", "flux1", "--largest", "inf"), "--largest 'inf' is not allowed"),
        (("family", "flux1", "--adapter", "full", "--precision", "int8-sdnq"), "trains a LoRA only"),
        (
            ("family", "flux1", "--modes", "layer", "--vram-budget", "8GiB"),
            "--vram-budget is for mode auto, and --modes layer is without it",
        ),
        (
            ("family", "flux1", "--vram-budget", "8"),
            "--vram-budget '8' is 8 bytes, below 1MiB; allowed: a size such",
        ),
        (("synthetic", "--vram-budget", "8GiB,lots"), "--vram-budget 'lots' is not allowed; allowed: a size such as"),
        (("synthetic", "--vram-budget", ""), "--vram-budget '' is not allowed"),
        (("family", "flux1", "--modes", "auto", "--size", "tiny"), "where nothing tells what is free: give a --vram-"),
        (("synthetic", "--size", "tiny", "--vram-budget", "1GiB,auto"), "give a --vram-budget, as in 128MiB"),
    ],
)
def test_what_is_not_allowed_is_exit_code_2(
    bench: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = bench(*words, "--out", tmp_path / "made")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize("words", [("family", "sd3"), ("synthetic",)])
def test_real_sizes_need_an_accelerator(bench: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]) -> None:
    result = bench(*words, "--out", tmp_path / "made")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "there is no accelerator; real sizes are measured on one. --size tiny runs on the CPU" in result.stderr
    assert not (tmp_path / "made").exists()


def test_out_is_needed(bench: Callable[..., Any]) -> None:
    result = bench("family", "sd3", *TINY)
    assert result.exit_code == 2
    assert "--out" in result.stderr
