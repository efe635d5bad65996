"""Where and with what a figure was made: machine, versions, commit, and how fast the card's link is."""

import os
import platform
import statistics
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import lowtide

COMMIT = "LOWTIDE_COMMIT"
"""Environment variable that names the commit where git is not there to say it."""
LINK_BYTES = 256 * 2**20


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
        "commit": commit or os.environ.get(COMMIT) or _first_line("git", "describe", "--always", "--dirty"),
    }


def machine(device: str) -> dict[str, Any]:
    """``provenance``, and on a CUDA card ``link_rates``."""
    return {**provenance(device), **(link_rates() if device == "cuda" else {})}


def link_rates() -> dict[str, float]:
    """GB/s of pinned copies to CPU memory, and back, one alone at a time."""
    here, there = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda"), torch.empty(LINK_BYTES, dtype=torch.uint8)
    there = there.pin_memory()
    rates = {}
    for direction, (to, source) in {"d2h": (there, here), "h2d": (here, there)}.items():
        times_ms = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        rates[f"{direction}_gb_per_s"] = LINK_BYTES / 1e6 / statistics.median(times_ms[1:])
    return rates


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
