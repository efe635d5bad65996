"""The head of a report: what each line says of its condition."""

from lowtide.bench.index import NOTHING, Entry, index
from lowtide.bench.record import Record
from lowtide.bench.report import build_report
from tests.bench.records import INERT, bad, ok


def entries(*records: Record) -> list[Entry]:
    return list(index(build_report(records)).entries)


def test_the_fastest_mode_within_each_share_of_nones_peak() -> None:
    (entry,) = entries(
        ok(mode="none", step_s=1.0, peak_gib=20.0),
        ok(mode="ffn", step_s=1.1, peak_gib=14.0),
        ok(mode="selective", step_s=1.2, peak_gib=10.1),
        ok(mode="layer", step_s=1.3, peak_gib=10.0),
        ok(mode="unsloth", step_s=1.4, peak_gib=6.0),
        ok(mode="layer-offload", step_s=0.1, peak_gib=1.0, receipt=INERT),
        ok(mode="selective-offload", step_s=1.5, peak_gib=5.97),
        bad("failed", "interval2", "boom"),
    )
    assert (entry.title, entry.name) == ("SD3 medium", "sd3_medium")
    assert entry.cells == (
        "",
        "1.000 / 20.00",
        "ffn 1.100 / 14.00 (1.10 ×)",
        "layer 1.300 / 10.00 (1.30 ×)",
        "unsloth 1.400 / 6.00 (1.40 ×)",
        "6 of 8",
    )


def test_conditions_without_a_result_come_last() -> None:
    found = entries(bad("failed", "none", "boom"), ok(mode="none", attention="no-cudnn"), ok("sdxl", "none"))
    assert [(entry.title, entry.cells[-1]) for entry in found] == [
        ("SD3 medium", "1 of 1"), ("SD3 medium", "0 of 1"), ("SDXL", "1 of 1"),
    ]  # fmt: skip


def test_without_figures_of_none_there_are_no_shares() -> None:
    failed = bad("failed", "none", "boom", work="sd15")
    found = entries(bad("oom", "none"), ok(mode="layer"), failed, ok("sdxl"))
    assert {entry.title: entry.cells[1:] for entry in found} == {
        "SD3 medium": ("OOM", NOTHING, NOTHING, "layer 1.000 / 8.00", "1 of 2"),
        "SDXL": ("not run", NOTHING, NOTHING, "layer 1.000 / 8.00", "1 of 1"),
        "SD 1.x": ("failed", NOTHING, NOTHING, NOTHING, "0 of 1"),
    }


def test_where_nothing_needs_less_memory_than_none_it_says_none() -> None:
    (entry,) = entries(ok(mode="none", step_s=1.0, peak_gib=20.0), ok(mode="ffn", step_s=1.1, peak_gib=19.9))
    assert entry.cells[2:] == (NOTHING, NOTHING, "none is the least", "2 of 2")
    (alone,) = entries(ok(mode="none"))
    assert alone.cells[2:] == (NOTHING, NOTHING, "none is the least", "1 of 1")


def test_a_cell_is_told_once() -> None:
    none, layer = ok(mode="none", step_s=1.0, peak_gib=20.0), ok(mode="layer", step_s=1.3, peak_gib=10.0)
    (entry,) = entries(none, layer)
    assert entry.cells[2:5] == ("layer 1.300 / 10.00 (1.30 ×)", "same", "same")
    (entry,) = entries(none, layer, ok(mode="ffn", step_s=1.1, peak_gib=14.0))
    assert entry.cells[2:5] == ("ffn 1.100 / 14.00 (1.10 ×)", "layer 1.300 / 10.00 (1.30 ×)", "same")


def test_reserved_memory_stands_beside_a_peak_where_it_is_much_more() -> None:
    (entry,) = entries(ok(mode="none", peak_gib=20.0, reserved=1.2), ok(peak_gib=10.0, step_s=1.3, reserved=1.1))
    assert entry.cells[1:3] == ("1.000 / 20.00 (24.00 reserved)", "layer 1.300 / 10.00 (1.30 ×, 11.00 reserved)")


def test_each_condition_is_a_line_and_what_all_share_is_told_once() -> None:
    found = index(build_report([ok("sdxl", "none"), ok("sdxl", "none", compile="regional"), ok("flux1", "none")]))
    assert found.common == "H200, bf16, LoRA 16, default attention, B 1, H 1024, W 1024"
    assert [(entry.title, entry.cells[0]) for entry in found.entries] == [
        ("Flux.1", "no compile, T 512"),
        ("SDXL", "no compile, T 77"),
        ("SDXL", "regional compile, T 77"),
    ]


def test_peaks_of_a_process_are_not_held_to_each_other() -> None:
    cpu = {"card": None}
    (entry,) = entries(ok(mode="none", peak_gib=20.0, machine=cpu), ok(mode="layer", peak_gib=5.0, machine=cpu))
    assert entry.cells[1:] == ("1.000 / 20.00", NOTHING, NOTHING, NOTHING, "2 of 2")
