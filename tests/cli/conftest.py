"""Runs the command line, in this process or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app


@pytest.fixture
def lowtide() -> Callable[..., Any]:
    """Runs a command in this process: a result with exit_code, stdout and stderr."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


@pytest.fixture
def lowtide_json(lowtide: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Runs a command with --json that must end well: the object that it prints, and it prints nothing else."""

    def run(*arguments: str) -> dict[str, Any]:
        result = lowtide(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python ARGUMENTS`` in a process of its own."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.run(
            [sys.executable, *arguments], text=True, check=False, timeout=240, env=environment, **options
        )

    return run
