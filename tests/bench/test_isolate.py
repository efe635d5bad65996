"""A cell's process: its result comes back, and whatever ends it costs only that cell."""

import os
from pathlib import Path

import pytest

from lowtide.bench.isolate import Died, in_turn, isolated
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


def run(log: Path, *hows: str) -> tuple[list[str], list[str]]:
    """What came of processes a, b, c … and what they did, in order."""
    calls = [(log, name, how) for name, how in zip("abcd", hows, strict=False)]
    results = [str(result) for result in in_turn(processes.in_its_turn, calls, device="cpu", timeout_s=60.0)]
    return results, log.read_text().splitlines()


def test_processes_begin_together_and_run_one_after_another(tmp_path: Path) -> None:
    results, lines = run(tmp_path / "log", "runs", "runs", "runs")
    assert results == ["a", "b", "c"]
    assert sorted(lines[:3]) == ["a begins", "b begins", "c begins"]
    assert lines[3:] == [f"{name} {what}" for name in "abc" for what in ("has its turn", "ends")]


def test_one_that_dies_or_has_no_turn_costs_the_others_nothing(tmp_path: Path) -> None:
    results, lines = run(tmp_path / "log", "dies before", "dies then", "has no turn", "runs")
    assert results == ["its process ended with code 5", "its process ended with code 6", "c", "d"]
    assert lines[-2:] == ["d has its turn", "d ends"]


def test_processes_that_wait_end_with_whoever_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    results = in_turn(processes.in_its_turn, [(log, "a", "runs"), (log, "b", "runs")], device="cpu", timeout_s=60.0)
    assert next(results) == "a"
    results.close()  # type: ignore[attr-defined]
    assert "b has its turn" not in log.read_text().splitlines()
