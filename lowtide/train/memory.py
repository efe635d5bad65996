"""How much memory a run takes, as its progress bar and report show it."""

import psutil
import torch


def device_for_training() -> torch.device:
    """The accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def peak_bytes(device: torch.device) -> int:
    """Peak of what tensors took on an accelerator; on the CPU, what the process holds now."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.max_memory_allocated(device)
