"""Sweeps: what is finished is skipped, what failed runs again, an interruption costs the cell that it hit."""

from pathlib import Path

import pytest

from lowtide import families
from lowtide.bench import record as records
from lowtide.bench.record import Condition, Figures, Record, State
from lowtide.bench.reference import differences
from lowtide.bench.sweep import Progress, family_conditions, sweep, synthetic_conditions
from lowtide.errors import ConfigError

FIGURES = Figures(0.1, (0.1, 0.1), 1, 10, 20, 30, 0.5, 100, 10)
CARD = {"card": "A card"}
CELLS = list(synthetic_conditions(["16x1024"], ["none", "layer", "unsloth"], ["lora"], rank=16))


class Runner:
    """Gives records without running anything."""

    def __init__(self, states: dict[str, State], stop_at: str | None = None) -> None:
        self.states = states
        self.stop_at = stop_at
        self.ran: list[str] = []

    def __call__(self, condition: Condition) -> Record:
        if condition.mode == self.stop_at:
            raise KeyboardInterrupt
        self.ran.append(condition.mode)
        state = self.states.get(condition.mode, "ok")
        return Record(condition, state, CARD, figures=FIGURES if state == "ok" else None, reason=None)


def swept(runner: Runner, out: Path, card: str = "A card", again: bool = False) -> list[Progress]:
    told: list[Progress] = []
    sweep(CELLS, runner, out, card, told.append, again)
    return told


def test_finished_cells_are_skipped_and_failed_ones_run_again(tmp_path: Path) -> None:
    out = tmp_path / "made" / "cells.jsonl"
    first, second = Runner({"layer": "failed", "unsloth": "oom"}), Runner({})
    swept(first, out)
    told = swept(second, out)
    assert first.ran == ["none", "layer", "unsloth"]
    assert second.ran == ["layer"]
    assert [(item.number, item.total, item.record is not None) for item in told] == [(0, 1, False), (0, 1, True)]
    assert [record.state for record in records.read(out)] == ["ok", "failed", "oom", "ok"]


def test_another_card_and_again_run_everything(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    swept(Runner({}), out)
    other, again = Runner({}), Runner({})
    swept(other, out, card="Another card")
    swept(again, out, again=True)
    assert other.ran == again.ran == ["none", "layer", "unsloth"]


def test_an_interruption_costs_one_cell(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        swept(Runner({}, stop_at="layer"), out)
    after = Runner({})
    swept(after, out)
    assert after.ran == ["layer", "unsloth"]


def test_a_line_that_was_cut_short_is_left_out_and_the_next_stands_alone(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    swept(Runner({}), out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:40])
    after = Runner({})
    swept(after, out)
    assert after.ran == ["unsloth"]
    assert [record.condition.mode for record in records.read(out)] == ["none", "layer", "unsloth"]
    (tmp_path / "more.jsonl").write_text(lines[0])
    assert len(list(records.read(tmp_path))) == 4


def test_lines_of_other_tools_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "host.jsonl").write_text('{"tool": "host", "rows": []}\n')
    assert list(records.read(tmp_path)) == []
    (tmp_path / "cells.jsonl").write_text('{"format": 99}\n')
    with pytest.raises(ConfigError, match=r"cells\.jsonl:1 is of another format"):
        list(records.read(tmp_path))


def test_a_rank_belongs_to_a_lora() -> None:
    cells = synthetic_conditions(["16x1024"], ["none", "diffusers"], ["frozen", "lora", "full"], rank=8)
    assert [(cell.adapter, cell.rank) for cell in cells] == [("frozen", None), ("lora", 8), ("full", None)]


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record(CELLS[0], "ok", CARD, figures=FIGURES, receipt={"blocks": {"whole": 3}, "inert": [], "ignored": []})
    records.append(tmp_path / "cells.jsonl", record)
    assert list(records.read(tmp_path)) == [record]


def test_large_families_are_cut_and_the_record_says_so() -> None:
    whole = next(family_conditions(["sd3_medium"], ["none"], {}))
    large = next(family_conditions(["wan21_14b"], ["none"], {"FR": 17}))
    assert whole.depth == {}
    assert 4 <= large.depth["blocks"] < 40
    assert large.sizes["FR"] == 17
    assert next(family_conditions(["wan21_14b"], ["none"], {}, most_parameters=10**15)).depth == {}


@pytest.mark.parametrize("key", [row.key for row in families.all_families()])
def test_the_sizes_of_a_row_are_those_of_the_public_sweep(key: str) -> None:
    words = ("batch", "pixels", "frames")
    assert [text for text in differences(Condition("family", key, "none")) if any(word in text for word in words)] == []
