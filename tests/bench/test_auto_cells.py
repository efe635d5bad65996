"""Cells of mode auto, here on the CPU in tiny sizes: what is planned, how long warm-up lasts, what no budget allows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide import families
from lowtide.auto.measuring import MOST_STEPS
from lowtide.auto.planner import Planner
from lowtide.bench import record as records
from lowtide.bench.cell import Effort, run_cell
from lowtide.bench.record import Condition, Record
from lowtide.bench.sweep import Budgets, family_conditions, finished, sweep, synthetic_conditions
from lowtide.bench.works import build
from lowtide.plan.costs import FORECAST, MEASURED
from lowtide.plan.modes import PLAIN
from lowtide.plan.solve import smallest_peak, solve
from lowtide.units import format_bytes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "family.jsonl"
QUICK = Effort(warm_up=1, steps=2)
LOTS = 2**34
DEPTHS = {"transformer_blocks": 6, "single_transformer_blocks": 8}


def condition(budget: int | str | None) -> Condition:
    return next(family_conditions(["flux1"], ["auto"], {}, budgets=(budget,), size="tiny"))


def run(budget: int, effort: Effort = QUICK) -> Record:
    return run_cell(condition(budget), effort, "cpu", {"card": None})


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """Of the cell's step by forecast: the least that a schedule reaches, and what the plain run takes."""
    task = build(condition(LOTS), "cpu")
    seen: dict[str, Any] = {}
    task.model.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
    task.forward()
    planner = Planner(task.model, families.find("flux1").stacks, torch.device("cpu"), 2**40, 1, can_move=True)
    planner.forecast((), seen)
    assert planner.costs is not None
    return smallest_peak(planner.costs).peak_bytes, solve(planner.costs, 2**40).prediction.peak_bytes


def numbers(spans: list[str]) -> list[int]:
    """Of blocks: ``["0–2, 4: kept", "3: recomputed"]`` is [0, 1, 2, 4, 3]."""
    places = [re.fullmatch(r"(\d+)(?:–(\d+))?", part) for text in spans for part in text.partition(":")[0].split(", ")]
    return [number for place in places if place for number in range(int(place[1]), int(place[2] or place[1]) + 1)]


def test_a_cell_within_a_budget_keeps_what_was_planned(peaks: tuple[int, int]) -> None:
    least, most = peaks
    budget = least + (most - least) // 4
    record = run(budget)
    assert record.state == "ok", record.reason
    assert record.figures is not None and record.receipt is not None
    assert record.inert == []
    assert 1 + 4 + 3 < record.figures.warm_up_steps <= MOST_STEPS  # a forecast, samples, each candidate
    assert len(record.figures.step_times_s) == 2
    assert record.figures.most_reserved_bytes is None  # nothing is reserved on the CPU
    plan = record.receipt["plan"]
    assert (plan["budget_bytes"], plan["source"]) == (budget, MEASURED)
    assert least <= plan["peak_bytes"] <= plan["room_bytes"] < budget and plan["step_ms"] > 0
    assert plan["fixed_setting"] != PLAIN
    assert {name: sorted(numbers(spans)) for name, spans in plan["stacks"].items()} == {
        name: list(range(depth)) for name, depth in DEPTHS.items()
    }
    assert record.receipt["totals"]["recompute_calls"] + record.receipt["totals"]["d2h_bytes"] > 0
    assert sum(record.receipt["blocks"].values()) == sum(DEPTHS.values())


@pytest.mark.parametrize(("warm_up", "steps"), [(1, 2), (2, 2), (5, 5)])
def test_warm_up_lasts_until_nothing_is_measured_any_more(warm_up: int, steps: int) -> None:
    record = run(LOTS, Effort(warm_up=warm_up, steps=2))
    assert record.figures is not None and record.receipt is not None
    assert record.figures.warm_up_steps == steps
    assert record.receipt["blocks"] == {"kept": sum(DEPTHS.values())}
    plan = record.receipt["plan"]
    assert (plan["fixed_setting"], plan["source"]) == (PLAIN, FORECAST)
    assert plan["stacks"] == {name: [f"0–{depth - 1}: kept on the device"] for name, depth in DEPTHS.items()}


def test_a_cell_that_does_not_settle_has_failed(peaks: tuple[int, int]) -> None:
    record = run(sum(peaks) // 2, Effort(warm_up=1, steps=2, most_warm_up=3))
    assert (record.state, record.reason) == ("failed", "RuntimeError: auto had not settled after 3 steps")


def test_a_budget_in_which_nothing_fits_is_unsupported_and_says_what_would_fit(peaks: tuple[int, int]) -> None:
    record = run(2**20)
    assert (record.state, record.figures, record.receipt) == ("unsupported", None, None)
    least = f"the smallest peak that can be reached is {format_bytes(peaks[0])} ({peaks[0]} bytes)"
    assert record.reason is not None and record.reason.startswith(
        f"no schedule fits in 1.00 MiB (1048576 bytes): {least}"
    )


def test_an_error_of_the_work_is_not_laid_to_the_budget() -> None:
    unknown = Condition("synthetic", "3 blocks", "auto", size="tiny", vram_budget=LOTS)
    record = run_cell(unknown, QUICK, "cpu", {"card": None})
    assert record.state == "failed"
    assert record.reason is not None and record.reason.startswith("ConfigError: no synthetic work")


def test_each_budget_is_a_cell_of_its_own_and_is_skipped_once_it_is_finished(tmp_path: Path) -> None:
    out, ran = tmp_path / "cells.jsonl", []

    def runner(cell: Condition) -> Record:
        ran.append((cell.mode, cell.vram_budget))
        return Record(cell, "unsupported", {"card": "A card"}, reason="no schedule fits")

    def swept(budgets: Budgets) -> list[tuple[str, int | str | None]]:
        ran.clear()
        cells = synthetic_conditions(["16x1024"], ["none", "auto"], ["lora"], rank=16, budgets=budgets)
        sweep(cells, runner, out, "A card", lambda _: None)
        return list(ran)

    assert swept([2**30]) == [("none", None), ("auto", 2**30)]
    assert swept([2**30, 2**31, "auto", 2**31]) == [("auto", 2**31), ("auto", "auto")]
    assert swept([2**31, "auto", 2**30]) == []
    assert [record.condition.vram_budget for record in records.read(out)] == [None, 2**30, 2**31, "auto"]


def test_records_from_before_there_were_budgets_keep_their_keys(tmp_path: Path) -> None:
    line = RESULTS.read_text(encoding="utf-8").partition("\n")[0]
    fields = json.loads(line)
    assert "vram_budget" not in fields["condition"] and fields["state"] == "ok"
    (tmp_path / "family.jsonl").write_text(line + "\n", encoding="utf-8")
    (record,) = records.read(tmp_path)
    assert record.condition.vram_budget is None
    assert record.condition.key == json.dumps(fields["condition"], sort_keys=True)
    assert finished(tmp_path, fields["machine"]["card"]) == {Condition(**fields["condition"]).key}
    records.append(tmp_path / "again.jsonl", record)
    assert list(records.read(tmp_path)) == [record, record]
