"""What docs/tools.md shows is what the commands print."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
SAMPLES = re.findall(r"```console\n\$ lowtide (.*?)\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
RUNNABLE = [(command, output) for command, output in SAMPLES if "./" not in command]


def normal(text: str, command: str) -> list[str]:
    """Lines without trailing spaces. Losses, saved bytes and what counts copies depend on the machine: digits go."""
    if command.startswith("verify"):
        text = re.sub(r"-?\d+\.\d+(e-?\d+)?|\d+(?= [KM]?i?B\b)", "#", text)
        text = re.sub(r"([ ─])\1+", r"\1", text)
        text = re.sub(r"(?m)^(pool|prefetch misses): .*", lambda line: re.sub(r"\d+", "#", line[0]), text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_every_command_has_a_sample() -> None:
    assert {command.split()[0] for command, _ in RUNNABLE} == {"families", "inspect", "verify"}


@pytest.mark.parametrize(("command", "output"), RUNNABLE, ids=lambda value: value.splitlines()[0][:50])
def test_the_sample_is_what_is_printed(command: str, output: Any) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    assert normal(result.stdout, command) == normal(output, command)
