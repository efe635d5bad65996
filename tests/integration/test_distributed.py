"""Two real gloo processes on the CPU: DDP, FSDP2 and accelerate around an attached model.

The scenarios are scripts in two_ranks/, one launch each: what starts a process group costs more than what is tested.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "two_ranks"
ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@pytest.mark.parametrize(
    ("script", "scenarios"),
    [("ddp.py", 6), ("fsdp2.py", 10), ("accelerator.py", 3)],
    ids=["ddp", "fsdp2", "accelerate"],
)
def test_two_ranks_train_with_the_gradients_of_a_plain_run(script: str, scenarios: int, tmp_path: Path) -> None:
    outputs = _run_two_ranks(SCRIPTS / script, tmp_path)
    held = [[line for line in output.splitlines() if line.startswith("held: ")] for output in outputs]
    assert held[0] == held[1]
    assert len(held[0]) == scenarios


def _run_two_ranks(script: Path, folder: Path) -> list[str]:
    """The output of each rank. A rank that fails ends the other one, which would wait for it."""
    files = [folder / f"rank{rank}.txt" for rank in range(2)]
    port = _free_port()
    ranks = [_start(script, rank, port, file) for rank, file in enumerate(files)]
    try:
        _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode != 0]
    assert not failed, "\n".join(f"rank {number}:\n{files[number].read_text()}" for number in failed)
    return [file.read_text() for file in files]


def _start(script: Path, rank: int, port: int, output: Path) -> subprocess.Popen[bytes]:
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **torchrun, **here, "PYTHONPATH": paths}
    with output.open("wb") as stream:
        return subprocess.Popen([sys.executable, script], env=environment, stdout=stream, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            time.sleep(1)  # the other one may have failed too: let it say why
            return
        assert time.monotonic() < deadline, f"still running after {LIMIT_S} s"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
