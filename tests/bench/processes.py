"""Functions that tests run in a process of their own."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lowtide.bench.cell import Effort, run_cell
from lowtide.bench.record import Condition, Record


def returned(value: int) -> tuple[int, int]:
    return value, os.getpid()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended() -> None:
    os._exit(5)


def sleeping() -> None:
    time.sleep(600)


def in_its_turn(log: Path, name: str, how: str, turn: Callable[[], None]) -> str:
    """how: what happens, and when."""
    _write(log, f"{name} begins")
    if how == "dies before":
        os._exit(5)
    if how == "has no turn":
        return name
    turn()
    if how == "dies then":
        os._exit(6)
    _write(log, f"{name} has its turn")
    time.sleep(0.1)
    _write(log, f"{name} ends")
    return name


def _write(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


def without_memory(
    condition: Condition,
    effort: Effort,
    device: str,
    machine: dict[str, object],
    turn: Callable[[], None] | None = None,
) -> Record:
    """As a cell to which others leave too little memory, where there are others."""
    if turn is None:
        return run_cell(condition, effort, device, machine)
    if condition.mode == "layer":
        return Record(condition, "oom", machine, reason="the others have it")
    if condition.mode == "ffn":
        os._exit(5)
    return run_cell(condition, effort, device, machine, turn)
