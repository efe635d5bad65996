"""How much memory a run takes, as its progress bar and report show it."""

import gc

import psutil
import torch

from lowtide.units import format_bytes


def device_for_training() -> torch.device:
    """The accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def give_back(device: torch.device) -> None:
    """Hand what nobody holds any more back to the device, and count the peak anew."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """On an accelerator the peak of what tensors took since the first step, or since memory ran out; on the CPU what
    the process holds."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.max_memory_allocated(device)


def in_words(memory_bytes: int, device: torch.device) -> str:
    """Of ``peak_bytes``: on the CPU it is no number to hold to a budget of activations."""
    return f"{'process ' * (device.type == 'cpu')}{format_bytes(memory_bytes)}"
