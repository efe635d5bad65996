"""docs/bench.md names what there is: modes with their settings, precisions, kernels, commands and their options."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.bench.attention import ATTENTION
from lowtide.bench.modes import ATTACHED, BASELINES, MODES
from lowtide.bench.precision import PRECISIONS
from lowtide.bench.sweep import SYNTHETIC
from lowtide.cli.app import app, benchmarks

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
TABLE = dict(
    re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.partition("### Modes")[2].partition("###")[0], re.MULTILINE)
)
COMMANDS = [str(command.name) for command in benchmarks.registered_commands]


def settings(words: str) -> dict[str, object]:
    """Of a line of the table: "`torch`, `interval` 2" is {"backend": "torch", "interval": 2}."""
    found: dict[str, object] = {"backend": None}
    for name, value in re.findall(r"`([\w-]+)`(?: (\d+))?", words):
        if value:
            found[name] = int(value)
        elif name == "offload_attention":
            found[name] = True
        else:
            found["backend"] = name
    return found


def test_every_mode_stands_in_the_table_in_order() -> None:
    assert tuple(TABLE) == MODES


@pytest.mark.parametrize("mode", ATTACHED)
def test_a_mode_s_settings_are_those_of_the_table(mode: str) -> None:
    words = TABLE[mode].replace("the same", TABLE["seg2-stride4"])
    assert settings(words) == dict(ATTACHED[mode])
    assert mode not in BASELINES


@pytest.mark.parametrize("name", [*PRECISIONS, *ATTENTION])
def test_precisions_and_kernels_are_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_default_works_are_named() -> None:
    assert f"{', '.join(SYNTHETIC[:-1])} and {SYNTHETIC[-1]}" in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_described_and_options_in_its_usage_exist(command: str) -> None:
    usages = re.findall(rf"`?lowtide bench {command}\b([^`\n]*)", PAGE)
    assert usages or f"`bench {command} --out DIR`" in PAGE
    shown = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200"}).stdout
    for option in {word for usage in usages for word in re.findall(r"--[\w-]+", usage)}:
        assert option in shown
