"""Every public bug case as one test: lowtide stands beside stock torch in a process of its own and must get it right."""

import atexit
import contextlib
import os
import re
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from lowtide.bench.isolate import isolated

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

# These scripts ask for things that this version of lowtide does not have. They lie here for the versions that will.
NEEDS_PLANNER = (74,)
NEEDS_TRAINER_EXPORT = (91, 92)
LATER = {*NEEDS_PLANNER, *NEEDS_TRAINER_EXPORT}

# It starts processes of its own, and those that are forked for the others must not.
WITH_PROCESSES = (76,)

# Longest first, so that no worker is left alone with one of them at the end.
SLOW = (87, 88, 76, 75, 77)


SETTINGS = {
    "GC_ADAPTER": "lowtide_adapter",
    "ADAPTER_BACKENDS": "torch,unsloth",
    "CASES_ROWS": "adapter",
    "OMP_NUM_THREADS": "1",
}


def number_of(script: Path) -> int:
    return int(script.name.partition("_")[0])


def scripts() -> list[Path]:
    found = [path for path in FOLDER.glob("[0-9]*.py") if number_of(path) not in LATER]
    return sorted(found, key=lambda path: (number_of(path) not in SLOW, number_of(path)))


@pytest.mark.parametrize("script", [pytest.param(path, id=path.stem) for path in scripts()])
def test_case(script: Path, tmp_path: Path) -> None:
    if number_of(script) in WITH_PROCESSES:
        code, output = run_anew(script)
    else:
        code = isolated(run_here, script, tmp_path / "output", device="cpu", timeout_s=400.0)
        output = (tmp_path / "output").read_text()
    assert code == 0, output[-6000:]
    rows = re.findall(r"^  adapter.*$", output, flags=re.MULTILINE)
    assert rows, f"the case has no row for the adapter, so it says nothing about lowtide:\n{output}"
    assert not any(" FAIL" in row for row in rows), output


def run_here(script: Path, output: Path) -> int | str:
    """Run a case as a program in this process, which does nothing else: it was forked with the libraries loaded, which
    takes most of a case's time. Returns its exit code; what it and its libraries write goes to a file."""
    os.environ |= SETTINGS
    os.chdir(FOLDER)
    sys.path[:0] = [str(FOLDER), str(ROOT)]
    sys.argv = [script.name]
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            runpy.run_path(script.name, run_name="__main__")
        except SystemExit as end:
            return 0 if end.code is None else end.code
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            atexit._run_exitfuncs()  # what dies at a program's end dies here
    return 0


def run_anew(script: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=FOLDER,
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout


def test_every_later_case_is_there() -> None:
    assert {number_of(path) for path in FOLDER.glob("[0-9]*.py")} >= LATER
