"""``lowtide bench host``, ``attention`` and ``profile``: what they print, write and refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli.app import app


@pytest.fixture
def bench() -> Callable[..., Any]:
    """Runs ``lowtide bench …`` in this process."""
    arguments = {"env": {"COLUMNS": "200"}}
    return lambda *words: CliRunner().invoke(app, ["bench", *map(str, words)], **arguments)


def test_host_prints_goals_and_appends_a_line(bench: Callable[..., Any], tmp_path: Path) -> None:
    for _ in range(2):
        result = bench("host", "--rounds", 1, "--depth", 2, "--out", tmp_path / "made")
        assert result.exit_code == 0, result.stderr
    assert "attention + MLP, µs a block" in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("lowtide interval 1")][:1]
    assert "0.7 met" in row or "0.7 missed" in row
    lines = [json.loads(line) for line in (tmp_path / "made" / "host.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert list(lines[0])[:2] == ["date", "card"]
    assert (lines[0]["tool"], lines[0]["rounds"], lines[0]["depth"], lines[0]["threads"]) == ("host", 1, 2, 1)
    assert [len(rows) for rows in lines[0]["results"].values()] == [9, 9]


def test_host_as_json_is_one_object(bench: Callable[..., Any]) -> None:
    result = bench("host", "--rounds", 1, "--depth", 2, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    first = found["results"]["attention + MLP"][0]
    assert (first["row"], first["added_us"], first["goal"]) == ("plain", 0, None)


def test_attention_compares_kernels(bench: Callable[..., Any], tmp_path: Path) -> None:
    words = ("attention", "sd3", "--size", "tiny", "--warm-up", 1, "--steps", 2, "--rank", 4)
    result = bench(*words, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    table = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    for kernel in ("default", "flash", "math"):
        assert 0.99 < float(table[kernel][-1]) <= 1
    assert table["cudnn"] == table["efficient"] == ["failed"]
    assert "cudnn: RuntimeError: No viable backend" in result.stdout
    assert "nothing about image quality" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "attention.jsonl").read_text().splitlines()]
    assert [line["condition"]["attention"] for line in lines] == ["default", "flash", "cudnn", "efficient", "math"]
    assert [line["gradient_cosine"] is None for line in lines] == [False, False, True, True, False]
    assert [line["state"] for line in lines] == ["ok", "ok", "failed", "failed", "ok"]


@pytest.mark.parametrize("work", ["16x4096", "flux1"])
def test_profile_shows_shares_and_no_seconds(bench: Callable[..., Any], work: str) -> None:
    result = bench("profile", work, "--size", "tiny", "--mode", "unsloth", "--warm-up", 1, "--steps", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{work}, unsloth: 2 steps; events: CPU operators")
    assert "no throughput figures" in result.stdout
    assert "Largest gap: " in result.stdout
    assert "s/step" not in result.stdout


def test_profile_as_json(bench: Callable[..., Any]) -> None:
    result = bench("profile", "16x1024", "--size", "tiny", "--warm-up", 1, "--steps", 2, "--mode", "none", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    for share in ("running", "copying", "gemm", "attention"):
        assert 0 < found[share] < 1, share
    assert found["gemm"] + found["attention"] < 1
    assert set(found["gap"]) == {"us", "after", "before"}
    assert "aten::addmm" in dict(found["top"]) and len(found["top"]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("host", "--device", "tpu"), "device 'tpu' is not allowed; allowed: cpu, cuda"),
        (("attention", "flux9"), "unknown family 'flux9'. Did you mean flux"),
        (("attention", "flux1", "--mode", "layers"), "mode 'layers' is not allowed; allowed: none, torch-checkpoint"),
        (("attention", "flux1", "--set", "B=0"), "--set 'B=0' is not allowed; expected NAME=N"),
        (("profile", "flux9"), "unknown family 'flux9'. Did you mean flux"),
        (("profile", "flux9"), "A synthetic work is BLOCKSxTOKENS, as in 16x4096"),
        (("profile", "flux1", "--mode", "layers"), "mode 'layers' is not allowed"),
        (("profile", "flux1", "--mode", "auto"), "mode auto needs a budget; `bench synthetic` and `bench family` take"),
        (("profile", "16x1024", "--mode", "auto"), "mode auto needs a budget"),
        (("profile", "flux1", "--adapter", "frozen"), "adapter 'frozen' is not allowed; allowed: lora, full"),
        (("profile", "16x1024", "--set", "B=2"), "a synthetic work says its size itself"),
        (("profile", "16x1024", "--size", "tiny", "--mode", "diffusers"), "does not support gradient checkpointing"),
    ],
)
def test_what_is_not_allowed_is_exit_code_2(bench: Callable[..., Any], words: tuple[str, ...], message: str) -> None:
    result = bench(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("host", "--device", "cuda"), "there is no CUDA device; --device cpu measures on any machine"),
        (("attention", "sd3"), "there is no accelerator; real sizes are measured on one. --size tiny runs on the CPU"),
        (("profile", "16x1024"), "there is no accelerator"),
    ],
)
def test_without_an_accelerator_it_is_exit_code_3(
    bench: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    result = bench(*words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert message in result.stderr
