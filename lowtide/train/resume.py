"""Checkpoints: everything that an exact continuation needs, in folders that are whole or not there."""

import hashlib
import io
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.train.adapters import Trained
from lowtide.train.config import LATEST, START_AFRESH, TrainConfig, changes, same_numbers
from lowtide.train.files import discard, new_folder

_FORMAT = 1
_STATE, _TENSORS = "state.json", "training_state.pt"
_NAME = re.compile(r"checkpoint-\d+")
_STRUCTURE = ("model_family", "model_type", "lora_type", "lora_rank", "lora_alpha")


@dataclass
class RunState:
    """Where a run stands.

    config: its flat keys. data: digest of what is trained on. step: updates done. batches: batches used.
    loss_before: of the fixed batch, before the first step. receipt: of the last step. setting: flat keys of the
    checkpointing that the run has come to since memory ran out; empty: what ``config`` says. out_of_memory: every time
    that it did (see train.escalate).
    """

    config: dict[str, Any]
    data: str
    step: int = 0
    batches: int = 0
    loss_before: float | None = None
    receipt: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    out_of_memory: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(output: Path, state: RunState, trained: Trained, tensors: Mapping[str, Any], limit: int) -> Path:
    """Write ``checkpoint-STEP``, then remove all but the ``limit`` newest.

    tensors: states of optimizer, scheduler and random generators.
    Raises MachineError where the disk failed: what was there before is then untouched.
    """
    path = output / f"checkpoint-{state.step}"
    with new_folder(path) as partial:
        trained.save(partial)
        _write_tensors(partial / _TENSORS, tensors)
        content = {"format": _FORMAT, "run": asdict(state), "digests": _digests(partial)}
        (partial / _STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    for old in checkpoints(output)[limit:]:
        discard(old)
    return path


def checkpoints(output: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    return sorted((path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name)), key=step_of)[::-1]


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.rpartition("-")[2])


def choose_checkpoint(output: Path, wanted: str) -> Path | None:
    """The checkpoint to go on from: ``latest`` or one by name; None where a run has none yet.

    A broken one is passed over with a warning. Raises ConfigError where the one asked for is missing or broken, or
    where all are broken.
    """
    there = checkpoints(output)
    if wanted != LATEST:
        return _named(output, wanted, there)
    for path in there:
        problem = problem_of(path)
        if problem is None:
            return path
        warnings.warn(f"{path} is broken ({problem}): going on from the one before it", stacklevel=2)
    if there:
        raise ConfigError(f"every checkpoint in {output} is broken. {START_AFRESH}")
    return None


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        content = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return f"format {content['format']}, made by another version of lowtide"
        digests = content["digests"]
        there = _digests(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_STATE}: {type(error).__name__} {error}"
    wrong = [name for name, digest in digests.items() if there.get(name) != digest]
    return f"{', '.join(wrong)}: missing or not as written" if wrong else None


def read_state(path: Path) -> RunState:
    return RunState(**json.loads((path / _STATE).read_text(encoding="utf-8"))["run"])


def read_tensors(path: Path) -> dict[str, Any]:
    return torch.load(path / _TENSORS, weights_only=True, map_location="cpu")


def check_continues(path: Path, state: RunState, config: TrainConfig, data: str) -> None:
    """Whether a run may go on from this checkpoint with this configuration.

    Raises ConfigError where the trained part would be another one; warns where the numbers will not be those of an
    uninterrupted run.
    """
    broken = changes(state.config, config, only=_STRUCTURE)
    if broken:
        raise ConfigError(f"{path} was made with {broken}. Set it back, choose another output_dir, or {START_AFRESH}")
    unlike = changes(state.config, config, without=same_numbers(config.keys))
    reasons = [unlike] if unlike else []
    reasons += ["other pictures or captions (or encoders whose files were written anew)"] if state.data != data else []
    if reasons:
        warnings.warn(
            f"{path} was made with {' and '.join(reasons)}: the run goes on, but its numbers are not those of an "
            "uninterrupted one",
            stacklevel=2,
        )


def _named(output: Path, wanted: str, there: list[Path]) -> Path:
    path = output / wanted
    if path not in there:
        names = ", ".join(entry.name for entry in there) or "none"
        raise ConfigError(f"resume_from_checkpoint: no {wanted} in {output}; there: {names}")
    problem = problem_of(path)
    if problem is not None:
        raise ConfigError(f"resume_from_checkpoint: {path} is broken ({problem})")
    return path


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Through memory, because torch's own writer reports a full disk as an internal error."""
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    path.write_bytes(buffer.getbuffer())


def _digests(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name != _STATE]
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
