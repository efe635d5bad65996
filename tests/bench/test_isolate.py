"""A cell's process: its result comes back, and whatever ends it costs only that cell."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.bench.isolate import Died, isolated
from tests.bench import processes


def test_the_result_comes_from_another_process() -> None:
    value, process = isolated(processes.returned, 3, device="cpu")
    assert value == 3
    assert process != os.getpid()


def test_a_killed_process_says_so() -> None:
    with pytest.raises(Died, match="killed: CPU memory ran out, probably"):
        isolated(processes.killed, device="cpu")


def test_a_process_that_ends_early_says_how() -> None:
    with pytest.raises(Died, match="ended with code 5"):
        isolated(processes.ended, device="cpu")


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(Died, match="longer than 1 s"):
        isolated(processes.sleeping, device="cpu", timeout_s=1.0)


WAITING = """
from lowtide.bench.isolate import isolated
from tests.bench import processes

if __name__ == "__main__":
    isolated(processes.told_and_sleeping, {path!r}, device="cpu")
"""


def test_a_process_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    script, told = tmp_path / "waiting.py", tmp_path / "pid"
    script.write_text(WAITING.format(path=str(told)))
    root = str(Path(__file__).parents[2])
    waiting = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root})
    try:
        process = int(_soon(lambda: told.exists() and told.read_text()))
        waiting.kill()
        waiting.wait()
        assert _soon(lambda: not _runs(process))
    finally:
        waiting.kill()


def _runs(process: int) -> bool:
    """What has ended may still stand in the table of processes, until its parent looks."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return state.stdout.strip()[:1] not in ("", "Z")


def _soon(find: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := find()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
