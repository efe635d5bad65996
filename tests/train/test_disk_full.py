"""A disk that fills while something is saved: one clear error, nothing lost, and the next run goes on."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import MachineError
from lowtide.train.files import clean_up, discard, new_file, new_folder, write_json, write_tensors

Train = Callable[..., dict[str, Any] | None]
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def small_files() -> Any:
    """In this process no file can grow beyond 100 kB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_big_file(path: Path) -> None:
    with new_file(path) as partial:
        partial.write_bytes(b"x" * 200_000)


def write_big_folder(path: Path) -> None:
    with new_folder(path) as partial:
        (partial / "small").write_text("new")
        (partial / "big").write_bytes(b"x" * 200_000)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("there", write_big_folder),
        ("there/file", write_big_file),
        ("there/file", lambda path: write_json(path, list(range(100_000)))),
        ("there/file", lambda path: write_tensors(path, {"a": torch.zeros(100_000)})),
        ("new", write_big_folder),
    ],
)
def test_what_was_there_stays(tmp_path: Path, small_files: None, name: str, write: Callable[[Path], None]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    before = contents(tmp_path)
    with pytest.raises(MachineError, match=f"cannot write {tmp_path / name}: .*untouched"):
        write(tmp_path / name)
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


def test_whole_files_and_folders_replace_old_ones(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with new_folder(tmp_path / "folder") as partial:
            (partial / content).write_text(content)
        write_json(tmp_path / "file", content)
    assert contents(tmp_path) == {"folder/two": b"two", "file": b'"two"\n'}
    discard(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_writer_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "folder") as partial:
            (partial / "file").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replaced", [1, 2])
def test_an_interrupt_while_a_folder_is_replaced_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    folder, calls, replace = tmp_path / "lora", [], os.replace
    folder.mkdir()
    (folder / "old").touch()

    def interrupted(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == replaced:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as partial:
        (partial / "new").touch()
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


def test_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".folder.partial-1").mkdir()
    (tmp_path / ".file.partial-2").write_text("half")
    (tmp_path / ".mine").write_text("kept")
    clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine"]


def test_what_was_to_be_replaced_by_a_run_that_was_killed_is_there_again(tmp_path: Path) -> None:
    for name in (".lora.before-1", ".lora.partial-1", "other", ".other.before-1", ".a.before-you"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "what").write_text(name)
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.before-you", "lora", "other"]
    assert (tmp_path / "lora" / "what").read_text() == ".lora.before-1"
    assert (tmp_path / "other" / "what").read_text() == "other"


def test_a_run_on_a_full_disk_ends_with_code_3_and_goes_on_later(
    train: Train, flat: dict[str, Any], output: Path, config_file: Callable[..., Path]
) -> None:
    assert train(max_train_steps=2) is not None
    before = contents(output / "checkpoint-2")
    limit = len(before["pytorch_lora_weights.safetensors"]) + 1000
    assert limit < len(before["training_state.pt"])
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "from lowtide.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "train", str(config_file())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert f"error: cannot write {output / 'checkpoint-4'}" in done.stderr and "Traceback" not in done.stderr
    assert contents(output / "checkpoint-2") == before
    assert not (output / "checkpoint-4").exists() and not list(output.glob(".*"))
    assert train() is not None
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 4
    assert json.loads((output / "report.json").read_text())["steps"] == 4
