"""What a report says of each state, and of runs that do not agree."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from lowtide import families
from lowtide.bench import describe, modes
from lowtide.bench.details import Detail, details
from lowtide.bench.failures import CUDNN, failures
from lowtide.bench.record import Condition, Record
from lowtide.bench.report import ON_CPU, TRUNCATED, Cell, Matrix, build_report
from lowtide.units import parse_bytes
from tests.bench.records import EVERY_STATE, GIB, MACHINE, bad, ok, receipt


def only(records: list[Record]) -> Matrix:
    (matrix,) = build_report(records).matrices
    return matrix


def cells(records: list[Record], column: int = 0) -> dict[str, Cell]:
    return {cell.mode: cell for cell in only(records).columns[column].cells}


def test_every_state_shows() -> None:
    found = {mode: (cell.state, cell.headline) for mode, cell in cells(EVERY_STATE).items()}
    assert found["none"] == ("ok", "0.5000 / 30.00")
    assert found["layer"] == ("ok", "0.7500 / 8.00")
    assert found["layer-offload"] == ("inert", "inert (offload_attention: attention is recomputed)")
    assert found["interval2"] == ("oom", "OOM")
    assert found["auto"] == ("failed", "failed (RuntimeError: a | b <c>)")
    assert found["selective"] == ("unsupported", "unsupported (no softmax attention)")
    assert found["activation-offload"] == ("not run", "not run")


def test_modes_that_were_run_or_published_have_a_row_in_a_fixed_order_and_unknown_ones_last() -> None:
    matrix = only([ok(mode="zebra"), ok(mode="unsloth"), ok(mode="aardvark"), ok(mode="none")])
    published = ("activation-offload", "layer", "interval2", "seg2-stride4", "seg2-stride4-offload")
    assert matrix.modes == ("none", *published, "unsloth", "aardvark", "zebra")
    assert {mode: cell.state for mode, cell in zip(matrix.modes, matrix.columns[0].cells, strict=True)} == {
        **dict.fromkeys(("none", "unsloth", "aardvark", "zebra"), "ok"),
        **dict.fromkeys(published, "not run"),
    }


def test_budgets_of_auto_are_rows_after_the_fixed_modes_from_the_smallest_on() -> None:
    budgets = ["auto", 12 * GIB, 8 * GIB, 3 * 2**29]
    records = [ok("flux1", "auto", vram_budget=budget) for budget in budgets]
    matrix = only([ok("flux1", "zebra"), *records, ok("flux1", "selective"), ok("flux1", "none")])
    titles = ("auto (1.5 GiB)", "auto (8 GiB)", "auto (12 GiB)", "auto (what is free)")
    assert matrix.modes == ("none", "selective", *titles, "zebra")
    assert len(matrix.columns) == 1 and {cell.state for cell in matrix.columns[0].cells} == {"ok"}


@given(integers(1, 2**45))
def test_the_title_of_a_budget_says_it_exactly(size_bytes: int) -> None:
    assert parse_bytes(describe.exact_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("12GiB", "12 GiB"),
        ("10 GiB", "10 GiB"),
        ("16GB", "16 GB"),
        ("1.5GiB", "1.5 GiB"),
        ("600MiB", "600 MiB"),
        ("1048577", "1048577 B"),
    ],
)
def test_a_budget_is_told_as_people_wrote_it(size: str, words: str) -> None:
    assert describe.exact_size(parse_bytes(size)) == words


def test_auto_is_compared_and_may_take_what_none_takes() -> None:
    found = cells([ok(mode="none", step_s=2.0), ok(mode="auto", step_s=2.5, vram_budget=12 * GIB)])["auto (12 GiB)"]
    assert (found.ratios, found.remarks, found.reference) == ("1.25 × none", (), "no reference")


def test_without_public_figures_only_what_was_run_has_a_row() -> None:
    assert only([ok("flux1", "layer"), ok("flux1", "none")]).modes == ("none", "layer")
    assert only([ok("16x1024", "none", adapter="full")]).modes == ("none",)
    assert only([ok("16x1024", "none")]).modes == ("none", "ffn", "unsloth-ffn", "layer", "unsloth")


def test_the_order_of_modes_is_that_of_the_bench() -> None:
    assert describe.MODES == modes.MODES
    settings = {"backend": "none", "offload_attention": False}
    for mode, arguments in modes.ATTACHED.items():
        found = {**settings, **arguments}
        moves = str(found["backend"]).startswith("unsloth") or found["offload_attention"]
        assert describe.offloads(mode) == bool(moves), mode
    assert not any(map(describe.offloads, modes.BASELINES))


def test_ratios_are_to_none_and_torch_of_the_same_condition() -> None:
    other = [ok(mode="none", step_s=9.0, compile="regional"), ok(mode="layer", step_s=3.0, compile="regional")]
    found = cells([*EVERY_STATE, *other])
    assert found["layer"].ratios == "1.50 × none · 0.94 × torch"
    assert found["none"].ratios == "0.62 × torch"
    assert found["torch-checkpoint"].ratios == "1.60 × none"
    assert cells([*EVERY_STATE, *other], column=1)["layer"].ratios == "0.33 × none"


@pytest.mark.parametrize("mode", ["layer-offload", "interval2", "auto", "selective", "activation-offload"])
def test_what_is_no_result_has_no_ratios(mode: str) -> None:
    cell = cells(EVERY_STATE)[mode]
    assert (cell.result, cell.ratios) == (None, "")


def test_an_inert_none_is_no_base_of_ratios() -> None:
    inert = receipt(("backend", "nothing was recomputed"))
    assert cells([ok(mode="torch-checkpoint", receipt=inert), ok(mode="layer")])["layer"].ratios == ""


@pytest.mark.parametrize(
    "option",
    [
        ("segment_stride", "no block was left between two segments"),
        ("single_transformer_blocks", "this stack is in no row"),
        ("interval", "no segment held more than one block in this step"),
    ],
)
@pytest.mark.parametrize("kind", ["inert", "ignored"])
def test_any_option_without_effect_makes_a_cell_inert(option: tuple[str, str], kind: str) -> None:
    note = {"option": option[0], "reason": option[1]}
    cell = cells([ok(mode="seg2-stride4", receipt=receipt(**{kind: [note]}))])["seg2-stride4"]
    assert cell.headline == f"inert ({option[0]}: {option[1]})"


def test_one_inert_run_is_enough() -> None:
    runs = [ok(receipt=receipt()), ok(receipt=receipt(("interval", "too wide")))]
    assert cells(runs)["layer"].state == "inert"


def test_references_name_their_card() -> None:
    found = cells(EVERY_STATE)
    assert found["layer"].reference == "H100 0.721 / 7.67 (1.36 × none); L40S 1.607 / 7.62 (1.35 × none)"
    assert found["selective"].reference == "no reference"
    assert found["interval2"].reference.startswith("H100 0.723 / 8.93")


def test_columns_say_in_what_the_published_condition_differs() -> None:
    matrix = only([ok(sizes={"B": 1}), ok(sizes={"B": 3}, rank=128)])
    assert [column.title for column in matrix.columns] == ["LoRA 16, B 1", "LoRA 128, B 3"]
    assert [column.differs for column in matrix.columns] == [("batch 3 there", "LoRA 128 there"), ()]
    assert matrix.common.startswith("H200, bf16, no compile, default attention, H 1024")


def test_of_the_sizes_those_that_people_set_are_told_and_what_is_not_the_familys() -> None:
    usual = dict(families.find("sd3_medium").real.vars)
    told = only([ok(sizes={**usual, "B": 1})]).common
    assert told == "H200, bf16, LoRA 16, no compile, default attention, B 1, H 1024, W 1024, T 333"
    assert only([ok(sizes={**usual, "B": 1, "C": 8})]).common == told.replace("T 333", "C 8, T 333")


def test_every_part_of_a_condition_is_a_column_of_its_own() -> None:
    parts: list[dict[str, Any]] = [
        {},
        {"precision": "fp8-torchao"},
        {"compile": "regional"},
        {"attention": "flex"},
        {"adapter": "full", "rank": None},
        {"rank": 4},
        {"sizes": {"H": 512}},
        {"machine": {"card": "NVIDIA L40S"}},
    ]
    assert len(only([ok(**part) for part in parts]).columns) == 8


def test_runs_that_agree_say_nothing_and_are_one_figure() -> None:
    cell = cells([ok(step_s=1.00, spread_s=0.05), ok(step_s=1.04, spread_s=0.02, peak_gib=8.05)])["layer"]
    assert (cell.headline, cell.remarks) == ("1.020 / 8.05", ())


def test_runs_that_differ_by_more_than_they_state_say_so() -> None:
    times = cells([ok(step_s=1.00, spread_s=0.05), ok(step_s=1.06, spread_s=0.02)])["layer"]
    assert times.remarks == ("runs disagree in s/step and spread: 1 ± 0.05, 1.06 ± 0.02",)
    peaks = cells([ok(peak_gib=8.0), ok(peak_gib=8.2)])["layer"]
    assert peaks.remarks == ("runs disagree in peak GiB: 8.00, 8.20",)
    states = cells([ok(), bad("failed", "layer", "killed")])["layer"]
    assert (states.state, states.remarks) == ("ok", ("runs disagree in states: ok, failed",))


def test_records_of_an_older_commit_are_left_out_and_counted() -> None:
    matrix = only([ok(step_s=2.0, machine={"commit": "older"}), ok(step_s=1.0)])
    assert matrix.columns[0].cells[matrix.modes.index("layer")].headline == "1.000 / 8.00"
    (detail,) = details(matrix)
    assert detail.notes == ("1 earlier record of another commit is left out (1 ok)",)


def test_the_states_of_what_is_left_out_are_told() -> None:
    older = [replace(bad("failed", "layer", "x"), machine={**MACHINE, "commit": commit}) for commit in "ab"]
    (detail,) = details(only([*older, ok(machine={"commit": "c"}), ok()]))
    assert detail.notes == ("3 earlier records of other commits are left out (2 failed, 1 ok)",)


@pytest.mark.parametrize(
    ("reserved", "words"), [((1.049, 1.04), ""), ((1.06,), "8.48 reserved"), ((1.06, 1.5), "12.00 reserved")]
)
def test_reserved_memory_is_told_where_it_is_much_more(reserved: tuple[float, ...], words: str) -> None:
    assert cells([ok(peak_gib=8.0, reserved=each) for each in reserved])["layer"].reserved == words
    assert cells([ok(receipt=receipt(("interval", "too wide")), reserved=2.0)])["layer"].reserved == ""


CUDA = "RuntimeError: CUDA error: an illegal memory access"


@pytest.mark.parametrize(
    ("reason", "attention", "machine", "more"),
    [
        (CUDA, "default", {}, f"; {CUDNN}"),
        (CUDA, "flash", {}, ""),
        (CUDA, "default", {"card": "NVIDIA L40S"}, ""),
        (CUDA, "default", {"torch": "2.12.0"}, ""),
        ("ValueError: no", "default", {}, ""),
    ],
)
def test_what_fails_without_lowtide_is_told(reason: str, attention: str, machine: dict[str, Any], more: str) -> None:
    failed = [bad("failed", mode, reason, attention=attention) for mode in ("none", "layer")]
    matrix = only([replace(record, machine={**MACHINE, **machine}) for record in failed])
    assert list(failures(matrix)) == [f"fails without lowtide, too{more}."]


def test_only_failures_of_none_in_the_same_condition_are_not_the_modes() -> None:
    none, layer = bad("failed", "none", "boom"), bad("failed", "layer", "boom")
    assert list(failures(only([ok(mode="none"), layer]))) == []
    assert list(failures(only([none, ok()]))) == []
    assert list(failures(only([bad("failed", "none", "boom", rank=4), ok(mode="none"), layer]))) == []
    assert list(failures(only([none, layer, ok(rank=4)]))) == ["LoRA 16: fails without lowtide, too."]


def test_a_peak_that_is_no_lower_says_so() -> None:
    found = cells([ok(mode="none", peak_gib=8.0), ok(mode="ffn", peak_gib=7.95), ok(mode="unsloth", peak_gib=7.0)])
    assert found["ffn"].remarks == ("peak is not below none's",)
    assert found["unsloth"].remarks == ()
    trained = {"adapter": "full", "rank": None}
    found = cells([ok(mode="layer", **trained), ok(mode="unsloth", **trained)])
    assert found["unsloth"].remarks == ("peak is not below layer's: weights, gradients and optimizer states make it",)


def test_a_truncated_model_is_another_work_and_says_so() -> None:
    report = build_report([ok("ltx2_3"), ok("ltx2_3", depth={"transformer_blocks": 12})])
    whole, cut = report.matrices
    assert (whole.warnings, cut.warnings) == ((), (TRUNCATED,))
    assert cut.title == "LTXVideo2 2.3 (truncated to 12 transformer_blocks)"
    assert (whole.name, cut.name) == ("ltx2_3", "ltx2_3-transformer_blocks-12")


def test_a_truncated_model_stands_beside_no_public_figure() -> None:
    report = build_report([ok("sd3_medium", "layer", depth={"transformer_blocks": 6})])
    (matrix,) = report.matrices
    (cell,) = matrix.columns[0].cells
    assert cell.reference == "no reference (truncated)"
    assert (cell.references, matrix.published, matrix.columns[0].differs, report.sources) == ((), None, (), ())


def test_tiny_cells_are_a_work_of_their_own_beside_no_public_figure() -> None:
    whole, tiny = build_report([ok(), ok(size="tiny"), ok(mode="none", size="tiny")]).matrices
    assert (whole.title, tiny.title) == ("SD3 medium", "SD3 medium (tiny)")
    assert whole.columns[0].cells[0].references
    assert [cell.reference for cell in tiny.columns[0].cells] == ["no reference (tiny model)"] * 2
    assert tiny.published is None and tiny.modes == ("none", "layer")
    assert len({whole.name, tiny.name}) == 2


def test_cells_of_a_cpu_say_so_and_stand_beside_no_public_figure() -> None:
    cpu = {"card": None}
    on_card, on_cpu = build_report([ok(mode="none", machine=cpu), ok(machine=cpu), ok()]).matrices
    assert (on_card.title, on_cpu.title) == ("SD3 medium", "SD3 medium (on a CPU)")
    assert (on_card.warnings, on_cpu.warnings) == ((), (ON_CPU,))
    assert [cell.reference for cell in on_cpu.columns[0].cells] == ["no reference (CPU)"] * 2
    assert [cell.remarks for cell in on_cpu.columns[0].cells] == [(), ()]  # peaks of a process are not held together
    both = only([ok(size="tiny", machine=cpu)])
    assert both.title == "SD3 medium (tiny, on a CPU)"
    assert both.columns[0].cells[0].reference == "no reference (tiny model)"


def test_works_whose_names_collide_have_names_of_their_own() -> None:
    works = ["a.b", "a b", "A-B", "a-b-2", "é", "ü", "16x1024"]
    records = [*map(ok, works), replace(ok("sdxl"), condition=Condition("family", "16x1024", "layer"))]
    names = [matrix.name for matrix in build_report(records).matrices]
    assert len({name.lower() for name in names}) == len(records)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([ok(step_s=1.0, spread_s=0.1, steps=10)], "10 steps, 0.95–1.05 s"),
        ([ok(step_s=1.0, spread_s=0.1, steps=2)], "only 2 steps, 0.95–1.05 s"),
        ([ok(step_s=1.0, steps=10), ok(step_s=1.0, spread_s=0.02, steps=5)], "10 + 5 steps, 0.99–1.01 s"),
        ([ok(step_s=1.0, steps=10), ok(step_s=1.0, spread_s=0.02, steps=4)], "only 10 + 4 steps, 0.99–1.01 s"),
        ([ok(receipt=receipt(("interval", "too wide")))], ""),
        ([bad("oom", "layer")], ""),
    ],
)
def test_a_cell_says_how_many_steps_were_counted_and_how_far_they_lie_apart(records: list[Record], words: str) -> None:
    assert cells(records)["layer"].steps == words


def test_works_stand_in_a_fixed_order() -> None:
    found = build_report([ok("unheard_of"), ok("sdxl"), ok("flux1"), ok("32x4096"), ok("16x16384"), ok("16x1024")])
    titles = [matrix.title for matrix in found.matrices]
    assert titles == [
        *("16 blocks × 1024 tokens", "16 blocks × 16384 tokens", "32 blocks × 4096 tokens"),
        *("Flux.1", "SDXL", "unheard_of"),
    ]


def test_details_of_inert_cells_hold_no_figures() -> None:
    by_mode = {detail.mode: detail for detail in details(only(EVERY_STATE))}
    assert (by_mode["layer"].reserved, by_mode["layer"].host, by_mode["layer"].runs) == (
        "8.32",
        "3.00",
        "1 (5 steps after 5)",
    )
    assert by_mode["layer"].blocks == "23 whole, 1 kept"
    inert = by_mode["layer-offload"]
    assert (inert.spread, inert.reserved, inert.host, inert.first_step) == ("", "", "", "")
    assert set(by_mode) == {record.condition.mode for record in EVERY_STATE}


PLAN = {
    "budget_bytes": 12 * GIB,
    "room_bytes": 12 * GIB,
    "fixed_setting": None,
    "source": "measured",
    "peak_bytes": 11 * GIB,
    "step_ms": 987.65,
    "stacks": {"a": ["0–3, 8: kept on the device", "4–7: recomputed whole"], "b": ["0: kept on the device"]},
}


def planned(**more: Any) -> Record:
    record = ok("flux1", "auto", vram_budget=12 * GIB, peak_gib=10.5, receipt=receipt(plan={**PLAN, **more}))
    assert record.figures is not None
    return replace(record, figures=replace(record.figures, most_reserved_bytes=11 * GIB + GIB // 2))


def behind(record: Record) -> Detail:
    (detail,) = details(only([record]))
    return detail


def test_what_auto_predicted_stands_beside_what_was_measured() -> None:
    detail = behind(planned())
    assert detail.notes == (
        "a schedule of its own (measured): predicted 0.9877 s / 11.00 GiB, measured 1.000 s / 10.50 GiB",
        "reserved over all steps: at most 11.50 of 12.00 GiB",
        "a 0–3, 8: kept on the device",
        "a 4–7: recomputed whole",
        "b 0: kept on the device",
    )
    fixed = behind(planned(fixed_setting="torch, interval 2", source="forecast"))
    assert fixed.notes[0].startswith("torch, interval 2 (forecast): predicted 0.9877 s / 11.00 GiB, measured 1.000 s")


def test_fallbacks_and_warnings_of_the_receipt_are_told() -> None:
    lists = {"fallbacks": [{"block": "b.1", "reason": "new carry"}] * 3, "warnings": ["attached twice"]}
    (detail,) = details(only([ok(receipt=receipt(**lists))]))
    assert detail.notes == ("3 fallbacks, the first at b.1: new carry", "attached twice")


def test_machines_are_told_with_ranges() -> None:
    machines = [{"link": 54.3, "packages": {"peft": "1"}}, {"link": 43.9}, {"card": None}]
    gpu, cpu = build_report([ok(machine=machine) for machine in machines]).machines
    assert (gpu.card, gpu.records, cpu.card) == ("H200", 2, "CPU")
    assert gpu.facts["link"] == "43.9 to 54.3"
    assert (gpu.facts["peft"], gpu.facts["driver"]) == ("1", MACHINE["driver"])
