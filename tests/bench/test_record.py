"""Lines of benchmark records: which are read, which are left out, and which are damaged, with their file and number."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.bench.record import Record, read
from lowtide.errors import ConfigError
from tests.bench.records import ok, receipt

PLAN = {"budget_bytes": 1, "fixed_setting": None, "source": "measured", "peak_bytes": 1, "step_ms": 1.0, "stacks": {}}


def damaged(change: dict[str, Any], **of: Any) -> str:
    """A good line with other values: ``{"figures.step_s": "fast"}``."""
    fields = json.loads(ok(**of).as_line())
    for place, value in change.items():
        *above, name = place.split(".")
        target = fields
        for key in above:
            target = target[key]
        target[name] = value
    return json.dumps(fields)


def said(folder: Path, line: str | bytes) -> str:
    """What is said of a line that stands second in its file, after a good one."""
    data = line if isinstance(line, bytes) else line.encode()
    (folder / "records.jsonl").write_bytes(ok().as_line().encode() + b"\n" + data + b"\n")
    with pytest.raises(ConfigError) as raised:
        list(read(folder))
    words = str(raised.value)
    assert words.startswith(f"{folder / 'records.jsonl'}:2 is ") and "\n" not in words and len(words) < 400
    return words.removeprefix(f"{folder / 'records.jsonl'}:2 is ")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), -0.5, 0.0, "fast", None, 10**400, True, [1.0]], ids=repr
)
@pytest.mark.parametrize("name", ["step_s", "first_step_s"])
def test_what_is_no_time_is_damage(tmp_path: Path, name: str, value: Any) -> None:
    assert said(tmp_path, damaged({f"figures.{name}": value})).startswith(f"no benchmark record: figures.{name}: ")


@pytest.mark.parametrize("value", [[], [0.0], [1.0, float("nan")], ["x"], None, 1.0], ids=repr)
def test_what_are_no_times_is_damage(tmp_path: Path, value: Any) -> None:
    assert "figures.step_times_s" in said(tmp_path, damaged({"figures.step_times_s": value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, None, 10**400, "8", 1.5], ids=lambda v: str(v)[:9])
@pytest.mark.parametrize("name", ["peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes", "parameters"])
def test_what_is_no_peak_is_damage(tmp_path: Path, name: str, value: Any) -> None:
    assert said(tmp_path, damaged({f"figures.{name}": value})).startswith(f"no benchmark record: figures.{name}: ")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("state", "great"),
        ("state", None),
        ("machine", None),
        ("machine.card", 5),
        ("machine.card", "x" * 500),
        ("reason", 5),
        ("receipt", "x"),
        ("receipt", {"inert": ["x"]}),
        ("receipt", {"inert": None}),
        ("receipt", {"ignored": [{"option": "x"}]}),
        ("receipt", {"fallbacks": ["x"]}),
        ("receipt", {"warnings": [5]}),
        ("receipt", {"blocks": {"whole": "many"}}),
        ("receipt", receipt(plan={**PLAN, "step_ms": "x"})),
        ("receipt", receipt(plan=5)),
        ("condition", None),
        ("condition.work", None),
        ("condition.work", "w" * 500),
        ("condition.kind", "other"),
        ("condition.mode", ""),
        ("condition.precision", None),
        ("condition.sizes", None),
        ("condition.sizes", {"B": "two"}),
        ("condition.sizes", {"B": -1}),
        ("condition.depth", None),
        ("condition.rank", "16"),
        ("condition.vram_budget", 0),
        ("condition.vram_budget", "much"),
        ("condition.unheard_of", 1),
        ("unheard_of", 1),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(tmp_path: Path, place: str, value: Any) -> None:
    words = said(tmp_path, damaged({place: value}))
    assert words.startswith(f"no benchmark record: {place}")


def test_figures_belong_to_the_state_ok(tmp_path: Path) -> None:
    assert said(tmp_path, damaged({"figures": None})) == "no benchmark record: state ok without figures"
    assert said(tmp_path, damaged({"state": "oom"})) == "no benchmark record: state oom with figures"


def test_of_several_faults_the_first_is_told_and_how_many_more(tmp_path: Path) -> None:
    words = said(tmp_path, damaged({"figures.step_s": "fast", "figures.parameters": None}))
    told = "Input should be a valid number, is 'fast' (and 1 more)"
    assert words == f"no benchmark record: figures.step_s: {told}"


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "hello", "{} x", '{"a":1}{"b"', '{"a" 1}'],
    ids=["deep list", "deep object", "word", "word after", "two in one", "no colon"],
)
def test_what_is_no_json_is_damage(tmp_path: Path, text: str) -> None:
    assert said(tmp_path, text).startswith("no JSON: ")


@pytest.mark.parametrize("line", ['{"condition": 1}', "[1]", '"format"', "null"])
def test_a_line_without_a_format_is_damage_among_records(tmp_path: Path, line: str) -> None:
    assert said(tmp_path, line) == "no benchmark record: it has no format, as the others in its file have"
    (tmp_path / "records.jsonl").write_text(line + "\n")
    assert list(read(tmp_path)) == [], "the file of another tool"


def test_what_is_not_utf_8_is_damage(tmp_path: Path) -> None:
    assert said(tmp_path, '{"format": 1, "x": "é"}'.encode("latin-1")) == "not UTF-8"


@pytest.mark.parametrize("end", range(1, len(ok().as_line()), 7))
def test_a_line_cut_anywhere_is_left_out(tmp_path: Path, end: int) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(ok(step_s=2.0).as_line() + "\n" + ok().as_line()[:end])
    assert list(read(path)) == [ok(step_s=2.0)]


def test_a_byte_order_mark_and_other_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (ok().as_line() + "\r\n\r\n" + ok(step_s=2.0).as_line()).encode())
    assert list(read(path)) == [ok(), ok(step_s=2.0)]


def test_committed_records_are_read_whole() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found: list[Record] = [record for name in ("family", "synthetic") for record in read(results / f"{name}.jsonl")]
    lines = [line for name in ("family", "synthetic") for line in (results / f"{name}.jsonl").read_text().splitlines()]
    assert len(found) == len(lines) > 290
    for record, line in zip(found, lines, strict=True):
        written = json.loads(line)
        again = json.loads(record.as_line())
        assert {name: again["condition"][name] for name in written["condition"]} == written["condition"]
        assert {name: again[name] for name in ("state", "machine", "reason", "receipt")} == {
            name: written[name] for name in ("state", "machine", "reason", "receipt")
        }
