"""Loads a pipeline from a folder on this machine, and says clearly what is wrong when it cannot."""

import json
from pathlib import Path
from typing import Any

import torch

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
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: cannot read {folder / 'model_index.json'}: {error}. {_EXPECTED}") from error
    if index.get("_class_name") != pipeline_class:
        raise ConfigError(
            f"{_KEY}: {folder} holds a {index.get('_class_name')}, but this model_family needs a {pipeline_class}"
        )


def load_pipeline(pipeline_class: Any, folder: Path, dtype: torch.dtype, without: tuple[str, ...]) -> Any:
    """The pipeline in ``folder``, without the parts named in ``without``: they are never read."""
    check_folder(folder, pipeline_class.__name__)
    try:
        return pipeline_class.from_pretrained(
            str(folder), torch_dtype=dtype, local_files_only=True, **dict.fromkeys(without)
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{_KEY}: cannot load the {pipeline_class.__name__} in {folder}: {error}") from error
