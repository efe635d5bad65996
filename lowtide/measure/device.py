"""How much memory an accelerator has to give."""

import torch

_SPARE_BYTES = 512 * 2**20
_SPARE_SHARE = 0.03


def available_bytes() -> int | None:
    """Free now, and what this process holds; None without an accelerator that says so."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def budget_within(memory_bytes: int) -> int:
    """What ``vram_budget="auto"`` takes of it: 512 MiB or 3 % are left, whichever is more."""
    return memory_bytes - max(_SPARE_BYTES, int(_SPARE_SHARE * memory_bytes))
