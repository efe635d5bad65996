"""What a report says of each state, and of runs that do not agree."""

from typing import Any

import pytest

from lowtide.bench.details import details
from lowtide.bench.record import Record
from lowtide.bench.report import Cell, Matrix, build_report
from tests.bench.records import EVERY_STATE, MACHINE, bad, ok, receipt


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
    assert found["unsloth"] == ("not run", "not run")


def test_modes_stand_in_a_fixed_order_and_unknown_ones_last() -> None:
    matrix = only([ok(mode="zebra"), ok(mode="auto"), ok(mode="aardvark"), ok(mode="none")])
    assert matrix.modes == (
        *("none", "torch-checkpoint", "diffusers", "activation-offload", "ffn", "unsloth-ffn", "layer"),
        *("layer-offload", "interval2", "seg2-stride4", "seg2-stride4-offload", "unsloth", "selective"),
        *("selective-offload", "auto", "aardvark", "zebra"),
    )
    assert "diffusers" not in only([ok("16x1024")]).modes


def test_ratios_are_to_none_and_torch_of_the_same_condition() -> None:
    other = [ok(mode="none", step_s=9.0, compile="regional"), ok(mode="layer", step_s=3.0, compile="regional")]
    found = cells([*EVERY_STATE, *other])
    assert found["layer"].ratios == "1.50 × none · 0.94 × torch"
    assert found["none"].ratios == "0.62 × torch"
    assert found["torch-checkpoint"].ratios == "1.60 × none"
    assert cells([*EVERY_STATE, *other], column=1)["layer"].ratios == "0.33 × none"


@pytest.mark.parametrize("mode", ["layer-offload", "interval2", "auto", "selective", "unsloth"])
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
    assert found["unsloth"].reference == "no reference"
    assert found["interval2"].reference.startswith("H100 0.723 / 8.93")


def test_columns_say_in_what_the_published_condition_differs() -> None:
    matrix = only([ok(sizes={"B": 1}), ok(sizes={"B": 3}, rank=128)])
    assert [column.title for column in matrix.columns] == ["LoRA 16, B 1", "LoRA 128, B 3"]
    assert [column.differs for column in matrix.columns] == [("batch 3 there", "LoRA 128 there"), ()]
    assert matrix.common.startswith("H200, bf16, no compile, default attention, H 1024")


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
    assert detail.notes == ("1 earlier records of other commits left out",)


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
    assert (whole.truncated, cut.truncated) == (False, True)
    assert cut.title == "LTXVideo2 2.3 (truncated to 12 transformer_blocks)"
    assert cut.columns[0].differs[0] == "whole model there"
    assert whole.name != cut.name


def test_works_stand_in_a_fixed_order() -> None:
    found = build_report([ok("unheard_of"), ok("sdxl"), ok("flux1"), ok("32x4096"), ok("16x16384"), ok("16x1024")])
    titles = [matrix.title for matrix in found.matrices]
    assert titles == [
        *("16 blocks × 1024 tokens", "16 blocks × 16384 tokens", "32 blocks × 4096 tokens"),
        *("Flux.1", "SDXL", "unheard_of"),
    ]


def test_details_of_inert_cells_hold_no_figures() -> None:
    by_mode = {detail.mode: detail for detail in details(only(EVERY_STATE))}
    assert (by_mode["layer"].reserved, by_mode["layer"].host, by_mode["layer"].runs) == ("9.00", "3.00", "1 × 3 steps")
    assert by_mode["layer"].blocks == "23 whole, 1 kept"
    inert = by_mode["layer-offload"]
    assert (inert.spread, inert.reserved, inert.host, inert.first_step) == ("", "", "", "")
    assert set(by_mode) == {record.condition.mode for record in EVERY_STATE}


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
