"""``lowtide train`` and ``lowtide cache``: what people type, and what they see."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli.app import app

ConfigFile = Callable[..., Path]


def lowtide(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"learnin_rate": 1}, "unknown key 'learnin_rate'. Did you mean 'learning_rate'?"),
        ({"gradient_checkpointing_backend": "False"}, "gradient_checkpointing_backend: 'False' is not allowed"),
        ({"gradient_checkpointing_backend": "torchh"}, "Did you mean 'torch'?"),
        ({"gradient_checkpointing_interval": 0}, "gradient_checkpointing_interval: 0 is not allowed"),
        ({"gradient_checkpointing_interval": -1}, "gradient_checkpointing_interval: -1 is not allowed"),
        ({"gradient_checkpointing_interval": 1.5}, "gradient_checkpointing_interval: 1.5 is not allowed"),
        ({"gradient_checkpointing_segment_stride": 1}, "is smaller than"),
        ({"gradient_checkpointing_interval": None}, "gradient_checkpointing_segment_stride = 4 needs"),
        ({"pretrained_model_name_or_path": "/nowhere"}, "there is no folder /nowhere"),
        ({"data_dir": "/nowhere"}, "data_dir: there is no folder /nowhere"),
    ],
)
def test_bad_input_is_one_error_and_code_2(
    config_file: ConfigFile, output: Path, over: dict[str, Any], message: str
) -> None:
    result = lowtide("train", str(config_file(**over)))
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("error:") == 1 and "Traceback" not in result.stderr
    assert not output.exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to offload from")
@pytest.mark.parametrize(
    "over",
    [
        {"gradient_checkpointing_backend": "unsloth"},
        {"gradient_checkpointing_offload_attention": True},
        {
            "gradient_checkpointing": False,
            "gradient_checkpointing_interval": None,
            "gradient_checkpointing_segment_stride": None,
            "gradient_checkpointing_offload_attention": True,
        },
    ],
    ids=["unsloth", "attention", "attention alone"],
)
def test_offload_without_an_accelerator_is_an_error_before_anything_is_made(
    config_file: ConfigFile, output: Path, tmp_path: Path, over: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    result = lowtide("train", str(config_file(cache_dir=str(cache), **over)))
    assert result.exit_code == 2
    assert "error: offload needs an accelerator" in result.stderr and "Traceback" not in result.stderr
    assert not output.exists() and not cache.exists()


def test_an_image_that_is_none(config_file: ConfigFile, photos: Path, output: Path) -> None:
    (photos / "cat.jpg").write_bytes(b"GIF? no")
    result = lowtide("train", str(config_file(data_dir=str(photos))))
    assert result.exit_code == 2
    assert f"error: data_dir: {photos / 'cat.jpg'} cannot be read as a picture" in result.stderr
    assert not output.exists()


def test_a_run_and_what_it_shows(config_file: ConfigFile, output: Path) -> None:
    path = str(config_file())
    result = lowtide("train", path, "--set", "max_train_steps=2")
    assert result.exit_code == 0, result.stderr
    assert "step 2 of 2: loss" in result.stderr
    table = [line.split() for line in result.stdout.splitlines()]
    assert ["▶", "torch,", "interval", "2,", "stride", "4"] in [words[:6] for words in table]
    assert any(words[:1] == ["off"] and words[-1] == "nothing" for words in table)
    assert f"Weights: {output / 'lora'}" in result.stdout
    assert "--set data_dir=FOLDER_OF_PICTURES" in result.stdout
    again = lowtide("train", path, "--set", "max_train_steps=2")
    assert again.exit_code == 0
    assert "This run is done already: 2 steps." in again.stdout
    assert "--set resume_from_checkpoint=false" in again.stdout
    assert again.stdout.splitlines()[-20:] == result.stdout.splitlines()[-20:]
    other = lowtide("train", path, "--set", "max_train_steps=2", "--set", "seed=1")
    assert other.exit_code == 2
    assert "holds a finished run of 2 steps with seed 42 (now 1)" in other.stderr


def test_the_cache_alone(config_file: ConfigFile, output: Path, tmp_path: Path) -> None:
    result = lowtide("cache", str(config_file(cache_dir=str(tmp_path / "cache"))))
    assert result.exit_code == 0, result.stderr
    assert "6 pictures are ready in" in result.stdout
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 12
    assert not output.exists()


def test_a_finished_run_is_shown_without_loading_anything_slow(
    train: Callable[..., Any], config_file: ConfigFile
) -> None:
    train(max_train_steps=1)
    code = (
        "import sys; from lowtide.cli.app import app; app(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('torch', 'diffusers', 'numpy') if name in sys.modules])"
    )
    arguments = ["train", str(config_file()), "--set", "max_train_steps=1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "done already" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_ctrl_c_in_a_real_process(
    config_file: ConfigFile, output: Path, losses: Callable[[Path], list[float]], whole: Any
) -> None:
    def command(steps: int) -> list[str]:
        return [sys.executable, "-m", "lowtide", "train", str(config_file(max_train_steps=steps))]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(1000), stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Run the same command again: it goes on from there" in " ".join(shown.split())
    assert "stopping after this step; Ctrl-C again stops at once" in " ".join(told.split())
    steps = len(losses(output))
    assert (output / f"checkpoint-{steps}").is_dir() and not (output / "report.json").exists()
    subprocess.run(command(max(5, steps + 1)), check=True, capture_output=True, env=environment)
    assert losses(output)[:5] == whole.losses
    assert json.loads((output / "report.json").read_text())["steps"] == max(5, steps + 1)
