"""``lowtide bench report`` and ``lowtide bench compare``: words, files and exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lowtide.cli import bench_report
from lowtide.cli.app import Commands
from tests.bench.records import EVERY_STATE, ok, write


@pytest.fixture
def bench() -> Callable[..., Any]:
    """Runs a command as the `bench` group has it."""
    app = typer.Typer(cls=Commands)
    app.command("report")(bench_report.report)
    app.command("compare")(bench_report.compare)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_a_report_is_written_beside_the_records(bench: Callable[..., Any], tmp_path: Path) -> None:
    result = bench("report", write(tmp_path, EVERY_STATE))
    assert result.exit_code == 0, result.stderr
    assert "1 work, 10 cells: 3 results, 3 not run, 1 inert, 1 oom, 1 unsupported, 1 failed." in result.stdout
    for name in ("report.md", "report.html", "images/frontier-sd3_medium.svg"):
        assert (tmp_path / "report" / name).is_file()
    *_, text, page, plots = result.stdout.splitlines()
    assert [text, page] == [str(tmp_path / "report" / name) for name in ("report.md", "report.html")]
    assert plots == f"1 plot in {tmp_path / 'report' / 'images'}"


def test_out_says_where(bench: Callable[..., Any], tmp_path: Path) -> None:
    records = write(tmp_path / "records", [ok(step_s=1.0), ok(step_s=2.0)]) / "records.jsonl"
    result = bench("report", records, "--out", tmp_path / "page")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "page" / "report.html").is_file()
    assert not (tmp_path / "records" / "report").exists()
    assert "runs disagree: SD3 medium, s/step / GiB, layer: s/step and spread: 1 ± 0, 2 ± 0" in result.stdout


def test_nothing_to_report_on(bench: Callable[..., Any], tmp_path: Path) -> None:
    result = bench("report", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "holds no benchmark records (*.jsonl); `lowtide bench synthetic` makes some" in result.stderr
    result = bench("report", tmp_path / "nowhere")
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_a_regression_is_exit_code_1(bench: Callable[..., Any], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [ok(step_s=1.0)]), write(tmp_path / "b", [ok(step_s=2.0)])
    result = bench("compare", a, b)
    assert result.exit_code == 1
    assert "regression (worse beyond noise, or a result that is none any more): 1" in result.stdout
    assert "time 1.000 s ± 0 in 5 steps → 2.000 s ± 0 in 5 steps (+100.0 %)" in " ".join(result.stdout.split())
    assert bench("compare", b, a).exit_code == 0


def test_the_same_records_are_the_same(bench: Callable[..., Any], tmp_path: Path) -> None:
    a = write(tmp_path / "a", EVERY_STATE)
    result = bench("compare", a, a)
    assert result.exit_code == 0
    assert result.stdout.startswith("7 cells compared; the same within noise: 7.")


def test_nothing_compared_is_exit_code_2(bench: Callable[..., Any], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [ok()]), write(tmp_path / "b", [ok(machine={"card": "NVIDIA L40S"})])
    result = bench("compare", a, b)
    assert result.exit_code == 2
    assert "nothing was compared" in result.stderr and "card: H200 in A, L40S in B" in result.stderr
    assert result.stdout == ""
    result = bench("compare", a, b, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["compared"] == 0


def test_what_a_cpu_measured_is_told(bench: Callable[..., Any], tmp_path: Path) -> None:
    result = bench("report", write(tmp_path, [ok(size="tiny", machine={"card": None}), ok()]))
    assert "Measured on a CPU, where offload is simulated, and in no plot: 1 of them." in result.stdout


def test_json_is_one_object(bench: Callable[..., Any], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [ok(step_s=1.0)]), write(tmp_path / "b", [ok(step_s=2.0), ok(mode="ffn")])
    result = bench("compare", a, b, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["unchanged"], found["compared"], found["apart"]) == (0, 1, [])
    assert [(change["kind"], change["mode"], change["what"]) for change in found["changes"]] == [
        ("regression", "layer", "time"),
        ("new", "ffn", "state"),
    ]


def test_one_of_each_has_no_plural(bench: Callable[..., Any], tmp_path: Path) -> None:
    a = write(tmp_path, [ok(step_s=1.0)])
    assert "5 not run, 1 result." in bench("report", a).stdout
    assert ", 1 record: " in (tmp_path / "report" / "report.md").read_text()
    assert ", 1 record: " in (tmp_path / "report" / "report.html").read_text().replace("</b>", "")
    assert bench("compare", a, a).stdout.startswith("1 cell compared; the same within noise: 1.")


@pytest.mark.parametrize(
    "line", [ok().as_line().replace('"step_s": 1.0', '"step_s": NaN'), "[" * 100_000], ids=["NaN", "["]
)
def test_a_damaged_line_is_told_once_and_is_exit_code_2(bench: Callable[..., Any], tmp_path: Path, line: str) -> None:
    a, b = write(tmp_path / "a", [ok(step_s=0.54)]), tmp_path / "b"
    b.mkdir()
    (b / "records.jsonl").write_text(line + "\n")
    for arguments in (("compare", a, b), ("compare", b, a), ("report", b)):
        result = bench(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("records.jsonl:1 is no ") == 1 and "Traceback" not in result.stderr
