"""Where and with what a figure was made: the fields that every result line begins with."""

import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import lowtide


def provenance(device: str = "cuda", commit: str | None = None) -> dict[str, Any]:
    """Date, commit, versions and machine. commit: for a copy of the tree without git's own folder."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if device == "cuda" else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "packages": _versions("diffusers", "peft", "transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "lowtide": lowtide.__version__,
        "commit": commit or _first_line("git", "describe", "--always", "--dirty"),
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return None
    return output.partition("\n")[0] or None
