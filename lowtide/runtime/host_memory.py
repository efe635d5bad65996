"""How much CPU memory this process may take: the machine's, or its control group's where that is less."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
SHARE_OF_MACHINE = 0.6
"""Of what a process may have, that offload takes."""


@dataclass(frozen=True)
class HostMemory:
    """limit_bytes: all that there is for this process. available_bytes: what is free of it now."""

    limit_bytes: int
    available_bytes: int


def share_of_host_bytes() -> int | None:
    """How much CPU memory offload takes at most; None where the system does not say what there is."""
    memory = host_memory()
    return None if memory is None else int(SHARE_OF_MACHINE * memory.limit_bytes)


def host_memory() -> HostMemory | None:
    """What the machine and the control groups of this process allow; None where the system does not say."""
    machine = _machine()
    if machine is None:
        return None
    limit, available = machine
    for group_limit, used in _control_groups():
        limit = min(limit, group_limit)
        available = min(available, max(0, group_limit - used))
    return HostMemory(limit, available)


def _machine() -> tuple[int, int] | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        return _kib(lines["MemTotal"]), _kib(lines["MemAvailable"])
    except (OSError, KeyError):
        pass
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _control_groups() -> Iterator[tuple[int, int]]:
    """(limit, bytes used that cannot be given back) of every control group that this process is in."""
    for folder in _folders():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                yield limit, max(0, used - _file_cache(folder))


def _folders() -> Iterator[Path]:
    """A group's parents bind too. Inside a container the group's own folder is often mounted as the root."""
    seen: set[Path] = set()
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _ROOT / "memory" if controllers else _ROOT
        folder = root / path.lstrip("/")
        while folder != root:
            seen.add(folder)
            folder = folder.parent
    seen |= {_ROOT, _ROOT / "memory"}
    return iter(folder for folder in seen if folder.is_dir())


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(folder: Path) -> int:
    """Pages of files that the kernel gives back when somebody needs the memory."""
    try:
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))  # version 1: with the groups below
