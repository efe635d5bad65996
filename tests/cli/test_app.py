"""Exit codes, what goes where, and how long it takes to start."""

import errno
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import lowtide
from lowtide.cli.app import Commands
from lowtide.errors import ConfigError, LowtideError, MachineError, ReplayError, UnsupportedError


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.callback()
    def options() -> None:
        pass

    @app.command()
    def work() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (LowtideError("odd"), 1, "error: odd"),
        (ReplayError("other values"), 1, "error: other values"),
        (ConfigError("wrong [key]"), 2, "error: wrong [key]"),
        (UnsupportedError("no such scope"), 2, "error: no such scope"),
        (MachineError("disk full"), 3, "error: disk full"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/a.bin"), 3, "error: No space left on device: out/a.bin"),
        (MemoryError(), 3, "error: out of memory."),
        (torch.OutOfMemoryError("CUDA out of memory"), 3, "error: out of memory. CUDA out of memory"),
    ],
)
def test_exit_code_and_one_message(error: Exception, exit_code: int, message: str) -> None:
    result = CliRunner().invoke(app_that_raises(error), ["work"])
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", message + "\n")


def test_what_was_tried_is_part_of_the_message() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.add_note("Tried: torch")
    result = CliRunner().invoke(app_that_raises(error), ["work"])
    assert result.stderr == "error: out of memory. CUDA out of memory\nTried: torch\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug")])
def test_a_bug_is_not_dressed_up(error: Exception) -> None:
    result = CliRunner().invoke(app_that_raises(error), ["work"])
    assert result.exception is error
    assert result.exit_code == 1


def test_debugging_shows_the_traceback_and_keeps_the_exit_code() -> None:
    result = CliRunner().invoke(app_that_raises(ConfigError("wrong")), ["work"], env={"LOWTIDE_DEBUG": "1"})
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "in work" in result.stderr


ALLOWED_BACKENDS = "torch, torch-ffn, unsloth, unsloth-ffn, torch-selective, unsloth-selective"
WRONG_USAGE = [
    ((), "Usage"),
    (("inspct", "flux1"), "No such command"),
    (("inspect",), "Missing argument"),
    (("inspect", "flux1", "--intervl", "2"), "No such option"),
    (("inspect", "flux1", "--size", "huge"), "huge"),
    (("inspect", "flux1", "--backend", "False"), f"backend: 'False' is not allowed; allowed: {ALLOWED_BACKENDS}."),
    (("inspect", "flux1", "--backend", "torch_ffn"), "Did you mean 'torch-ffn'?"),
    (("inspect", "flux1", "--backend", "auto"), "backend = auto has no schedule before the first steps of training"),
    (("verify", "flux1", "--backend", "auto"), "backend = auto has no schedule before the first steps of training"),
    (("verify", "flux1", "--backend", "unslot"), "Did you mean 'unsloth'?"),
    (("verify", "flux1", "--offload-min-bytes", "-1"), "offload_min_bytes: '-1' is not allowed; allowed: a size"),
    (("inspect", "flux1", "--offload-min-bytes", "1 MiBi"), "Did you mean 'MiB'?"),
    (("inspect", "flux1", "--offload-atention"), "No such option"),
    (("inspect", "flux1", "--interval", "0"), "interval: '0' is not allowed; allowed: a whole number, 1 or more."),
    (("inspect", "flux1", "--interval", "-1"), "interval: '-1' is not allowed"),
    (("inspect", "flux1", "--interval", "1.5"), "interval: '1.5' is not allowed"),
    (
        ("inspect", "flux1", "--interval", "3", "--segment-stride", "2"),
        "segment_stride = 2 is smaller than interval = 3",
    ),
    (("inspect", "flux1", "--segment-stride", "2"), "segment_stride = 2 needs interval"),
    (("inspect", "flux1", "--backend", "none", "--interval", "2"), "interval = 2 needs a backend"),
    (("inspect", "fluks1"), "unknown family 'fluks1'. Did you mean flux1"),
    (("inspect", "./no/such/folder"), "no model folder at no/such/folder"),
    (("verify", "./no/such/folder"), "no model folder at no/such/folder"),
    (("verify", "flux1", "--backend", "False"), "backend: 'False' is not allowed"),
    (("verify", "flux1", "--interval", "0"), "interval: '0' is not allowed"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_USAGE, ids=lambda value: " ".join(value)[:40])
def test_wrong_usage(lowtide: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    result = lowtide(*arguments)
    assert result.exit_code == 2
    assert message in (result.stderr or result.stdout)
    assert "Traceback" not in result.output
    assert message == "Usage" or result.stdout == ""


def test_a_wrong_value_in_a_process_of_its_own(process: Callable[..., Any]) -> None:
    result = process("-m", "lowtide", "inspect", "flux1", "--backend", "False", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: backend: 'False' is not allowed")
    assert len(result.stderr.splitlines()) == 1


def test_a_full_disk_in_a_process_of_its_own(process: Callable[..., Any]) -> None:
    with open("/dev/full", "w") as full:
        result = process("-m", "lowtide", "inspect", "flux1", "--size", "tiny", "--json", stdout=full)
    assert result.returncode == 3
    assert "error: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_json_is_one_object_and_a_warning_goes_elsewhere(process: Callable[..., Any]) -> None:
    result = process("-m", "lowtide", "inspect", "sana", "--size", "tiny", "--interval", "99", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["settings"]["interval"] == 99
    assert "warning: interval 99 is wider than the deepest block stack" in result.stderr


def test_version(process: Callable[..., Any]) -> None:
    result = process("-m", "lowtide", "--version")
    assert (result.returncode, result.stdout) == (0, f"lowtide {lowtide.__version__}\n")


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == lowtide.__version__
    assert project["scripts"] == {"lowtide": "lowtide.cli.app:main"}


LOADED = "import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy", "PIL")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("lowtide", (*HEAVY, "pydantic", "typer", "rich")), ("lowtide.controls", HEAVY), ("lowtide.cli.app", HEAVY)],
)
def test_importing_loads_nothing_heavy(process: Callable[..., Any], module: str, heavy: tuple[str, ...]) -> None:
    result = process("-c", LOADED.format(module=module, heavy=heavy))
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_importing_lowtide_is_quick(process: Callable[..., Any]) -> None:
    code = "import time; start = time.perf_counter(); import lowtide; print(time.perf_counter() - start)"
    assert min(float(process("-c", code).stdout) for _ in range(3)) < 0.3


def test_public_names_are_there_and_others_are_not(process: Callable[..., Any]) -> None:
    names = ["attach", "checkpoint", "Handle", "CheckpointConfig"]
    result = process("-c", f"import lowtide; print([callable(getattr(lowtide, name)) for name in {names}])")
    assert result.stdout == f"{[True] * len(names)}\n", result.stderr
    assert set(names) <= set(dir(lowtide))
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        lowtide.atach  # noqa: B018
