"""Functions that tests run in a process of their own."""

import os
import signal
import time
from pathlib import Path


def returned(value: int) -> tuple[int, int]:
    return value, os.getpid()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended() -> None:
    os._exit(5)


def sleeping() -> None:
    time.sleep(600)


def told_and_sleeping(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
