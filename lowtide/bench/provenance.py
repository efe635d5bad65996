"""Where and with what a figure was made: machine, versions, commit, and how fast the card's link is."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.measure.link import link_rates

COMMIT = "LOWTIDE_COMMIT"
"""Environment variable that names the commit where git is not there to say it."""


def provenance(device: str = "cuda", commit: str | None = None) -> dict[str, Any]:
    """Date, commit, versions and machine. commit: for a copy of the tree without git's own folder; else ``COMMIT``."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if device == "cuda" else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "packages": _versions("diffusers", "peft", "transformers", "torchao", "sdnq"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "lowtide": lowtide.__version__,
        "commit": commit or os.environ.get(COMMIT) or _own_commit(),
    }


def machine(device: str) -> dict[str, Any]:
    """``provenance``, and on a CUDA card ``link_gb_per_s``."""
    return {**provenance(device), **(link_gb_per_s() if device == "cuda" else {})}


def link_gb_per_s() -> dict[str, float]:
    """GB/s of pinned copies to CPU memory, and back, one alone at a time."""
    rates = link_rates()
    return {
        "d2h_gb_per_s": rates.out_gib_per_s * 2**30 / 1e9,
        "h2d_gb_per_s": rates.back_gib_per_s * 2**30 / 1e9,
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _own_commit() -> str | None:
    """Of the repository that this package belongs to, wherever somebody stands; a virtual environment may lie in one
    that it does not."""
    folder = Path(lowtide.__file__).parent
    if _first_line("git", "-C", str(folder), "ls-files", "__init__.py") is None:
        return None
    return _first_line("git", "-C", str(folder), "describe", "--always", "--dirty")


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return None
    return output.partition("\n")[0] or None
