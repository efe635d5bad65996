"""Every public bug case as one test: lowtide stands beside stock torch in a process of its own and must get it right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

# These scripts ask for things that this version of lowtide does not have. They lie here for the versions that will.
NEEDS_PLANNER = (74,)
NEEDS_TRAINER_EXPORT = (91, 92)
LATER = {*NEEDS_PLANNER, *NEEDS_TRAINER_EXPORT}

# Longest first, so that no worker is left alone with one of them at the end.
SLOW = (87, 88, 76, 75, 77)


def number_of(script: Path) -> int:
    return int(script.name.partition("_")[0])


def scripts() -> list[Path]:
    found = [path for path in FOLDER.glob("[0-9]*.py") if number_of(path) not in LATER]
    return sorted(found, key=lambda path: (number_of(path) not in SLOW, number_of(path)))


@pytest.mark.parametrize("script", [pytest.param(path, id=path.stem) for path in scripts()])
def test_case(script: Path) -> None:
    environment = {
        **os.environ,
        "GC_ADAPTER": "lowtide_adapter",
        "ADAPTER_BACKENDS": "torch,unsloth",
        "CASES_ROWS": "adapter",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    rows = re.findall(r"^  adapter.*$", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert rows, f"the case has no row for the adapter, so it says nothing about lowtide:\n{done.stdout}"


def test_every_later_case_is_there() -> None:
    assert {number_of(path) for path in FOLDER.glob("[0-9]*.py")} >= LATER
