"""Loads a pipeline from a folder on this machine, and says clearly what is wrong when it cannot."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from lowtide.errors import ConfigError

_KEY = "pretrained_model_name_or_path"
_EXPECTED = "Expected a folder as diffusers' `save_pretrained` writes it (it holds model_index.json)"


def check_folder(folder: Path, pipeline_class: str) -> None:
    """Raises ConfigError if ``folder`` is not a saved pipeline of that class."""
    if not folder.is_dir():
        raise ConfigError(
            f"{_KEY}: there is no folder {folder}. {_EXPECTED}. This version loads folders only: fetch a model with "
            "`hf download NAME --local-dir FOLDER`"
        )
    index = _read_json(folder / "model_index.json")
    if index.get("_class_name") != pipeline_class:
        raise ConfigError(
            f"{_KEY}: {folder} holds a {index.get('_class_name')}, but this model_family needs a {pipeline_class}"
        )


def read_config(part: Path) -> dict[str, Any]:
    """The configuration of one part of a pipeline. Raises ConfigError if it cannot be read."""
    return _read_json(part / "config.json")


def load_pipeline(pipeline_class: Any, folder: Path, dtype: torch.dtype, without: tuple[str, ...]) -> Any:
    """The pipeline in ``folder`` on the CPU, without the parts named in ``without``: they are never read.

    The autoencoder is always in float32.
    """
    try:
        return pipeline_class.from_pretrained(
            str(folder),
            dtype={"vae": torch.float32, "default": dtype},
            use_safetensors=True,
            local_files_only=True,
            **dict.fromkeys(without),
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{_KEY}: cannot load the {pipeline_class.__name__} in {folder}: {error}") from error


def fingerprint(folder: Path, parts: Iterable[str]) -> str:
    """Changes when a file of one of these parts does: by name, size and time, as hashing weights takes minutes."""
    files = [file for part in parts for file in sorted((folder / part).rglob("*")) if file.is_file()]
    content = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error}. {_EXPECTED}") from error


def quiet_libraries() -> None:
    """Leave progress bars and hints of diffusers and transformers out: what matters is said by lowtide."""
    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
