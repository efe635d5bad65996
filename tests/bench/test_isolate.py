"""A cell's process: its result comes back, and whatever ends it costs only that cell."""

import os

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
