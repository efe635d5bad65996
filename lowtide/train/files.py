"""Safe writing: beside the place first, then renamed over it, so that a full disk never costs what was there."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lowtide.errors import MachineError

_PARTIAL, _BEFORE = ".partial-", ".before-"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; renamed over ``path`` at the end, removed on any error.

    Raises MachineError where the disk failed.
    """
    with _beside(path) as partial:
        yield partial
        _flush(partial)
        os.replace(partial, path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path`` to write into; renamed to ``path`` (which it replaces) at the end. One of the two
    is there whatever happens.

    Raises MachineError where the disk failed: what was at ``path`` is then still there.
    """
    with _beside(path) as partial:
        partial.mkdir()
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _flush(file)
        before = _hidden(path, _BEFORE)
        try:
            if path.exists():
                os.replace(path, before)
            os.replace(partial, path)
        except BaseException:  # an interrupt, too
            if before.exists() and not path.exists():
                os.replace(before, path)
            raise
        _remove(before)


@contextmanager
def folder_with_something(path: Path) -> Iterator[None]:
    """``path`` is there; where it was not before, it is gone again after an error that left it empty."""
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    with new_file(path) as partial:
        safetensors.torch.save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, dict(metadata or {})
        )


def write_json(path: Path, content: Any) -> None:
    with new_file(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def append_line(path: Path, content: Any) -> None:
    """One JSON object as a line at the end of a file. Raises MachineError where the disk failed."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
    except OSError as error:
        raise disk_failed(path, error) from error


def discard(path: Path) -> None:
    """Remove a folder or file: first out of its name, so that half of it is never taken for the whole."""
    doomed = _hidden(path, _PARTIAL)
    os.replace(path, doomed)
    _remove(doomed)


def clean_up(folder: Path) -> None:
    """Remove what an earlier process was writing in ``folder`` when it was killed, and put back what it was about to
    replace."""
    for entry in _left(folder, _BEFORE):
        path = folder / entry.name.removeprefix(".").rpartition(_BEFORE)[0]
        if path.exists():
            _remove(entry)
        else:
            os.replace(entry, path)
    for entry in _left(folder, _PARTIAL):
        _remove(entry)


def _left(folder: Path, mark: str) -> list[Path]:
    """Our own names with the mark, and nobody else's."""
    return [entry for entry in folder.glob(f".*{mark}*") if entry.name.rpartition(mark)[2].isdigit()]


def disk_failed(path: Path, error: Exception) -> MachineError:
    return MachineError(
        f"cannot write {path}: {error}. What was saved before is untouched. Make room (or choose another output_dir) "
        "and run the same command again: it goes on from the last checkpoint"
    )


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    partial = _hidden(path, _PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        yield partial
    except (OSError, SafetensorError) as error:
        raise disk_failed(path, error) from error
    finally:
        _remove(partial)


def _hidden(path: Path, mark: str) -> Path:
    """A name beside ``path`` that no other process takes."""
    return path.with_name(f".{path.name}{mark}{os.getpid()}")


def _flush(file: Path) -> None:
    """A rename must not reach the disk before the bytes do."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
