"""Two processes do not write into one folder: the second is told, and touches nothing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.train.alone import alone_in

Train = Callable[..., dict[str, Any] | None]
KILLED = """
import os, sys
from pathlib import Path
from lowtide.train.alone import alone_in
with alone_in(Path(sys.argv[1]), "output_dir"):
    print("in", flush=True)
    os.kill(os.getpid(), 9)
"""


def test_the_second_is_told_and_the_next_is_not(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path, "output_dir"),
        pytest.raises(ConfigError, match=r"output_dir: another process of lowtide is writing into .*--set output_dir="),
        alone_in(tmp_path, "output_dir"),
    ):
        pytest.fail("both are in")
    assert list(tmp_path.iterdir()) == []
    with alone_in(tmp_path, "output_dir"):
        assert len(list(tmp_path.iterdir())) == 1


def test_one_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("in\n", -9)
    with alone_in(tmp_path, "output_dir"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", ["latest", "false"])
def test_a_run_in_a_folder_that_another_one_uses_changes_nothing(train: Train, output: Path, resume: str) -> None:
    assert train(max_train_steps=2) is not None
    before = {path: path.stat().st_mtime_ns for path in sorted(output.rglob("*"))}
    with alone_in(output, "output_dir"), pytest.raises(ConfigError, match="another process"):
        train(max_train_steps=3, resume_from_checkpoint=resume)
    assert {path: path.stat().st_mtime_ns for path in sorted(output.rglob("*"))} == before
    assert train(max_train_steps=3) is not None


def test_a_cache_that_another_process_fills(train: Train, flat: dict[str, Any], output: Path) -> None:
    with alone_in(Path(flat["cache_dir"]), "cache_dir"), pytest.raises(ConfigError, match="cache_dir: another process"):
        train()
    assert not output.exists()
