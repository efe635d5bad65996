"""Batch scaling: which records stand side by side, and what is said of each batch."""

from lowtide.bench.html import html
from lowtide.bench.markdown import markdown
from lowtide.bench.record import Record
from lowtide.bench.report import build_report
from lowtide.bench.scaling import Scaling, scalings
from tests.bench.records import INERT, bad, ok

RECORDS = [
    ok("flux1", "none", step_s=0.5, peak_gib=10.0, sizes={"B": 1}),
    ok("flux1", "none", step_s=0.8, peak_gib=18.0, sizes={"B": 2}),
    bad("oom", "none", work="flux1", sizes={"B": 4}),
    ok("flux1", "layer", step_s=0.6, peak_gib=6.0, sizes={"B": 1}),
    ok("flux1", "layer", step_s=1.6, peak_gib=12.0, sizes={"B": 4}),
    ok("flux1", "layer-offload", sizes={"B": 2}, receipt=INERT),
]


def found(records: list[Record]) -> list[Scaling]:
    return [scaling for matrix in build_report(records).matrices for scaling in scalings(matrix)]


def test_samples_a_second_and_peak_of_each_mode_by_batch() -> None:
    (scaling,) = found(RECORDS)
    assert scaling.batches == (1, 2, 4)
    assert {row.mode: row.texts for row in scaling.rows} == {
        "none": [("2 / 10.00", False), ("2.5 / 18.00", True), ("OOM", False)],
        "layer": [("1.67 / 6.00", False), ("not run", False), ("2.5 / 12.00", True)],
        "layer-offload": [("not run", False), ("inert", False), ("not run", False)],
    }
    assert scaling.title == "H200, bf16, LoRA 16, no compile, default attention, H 1024, W 1024, T 512"


def test_a_batch_that_the_row_implies_counts() -> None:
    (scaling,) = found([ok("flux1"), ok("flux1", sizes={"B": 2})])
    assert scaling.batches == (1, 2)


def test_what_differs_in_more_than_the_batch_does_not_stand_together() -> None:
    assert found([ok("flux1", sizes={"B": 1}), ok("flux1", sizes={"B": 2, "H": 512})]) == []
    assert found([ok("flux1", sizes={"B": 1}), ok("flux1", sizes={"B": 2}, compile="regional")]) == []
    assert found([ok("flux1", sizes={"B": 1}), ok("flux1", sizes={"B": 2}, machine={"card": "NVIDIA L40S"})]) == []
    both = [ok("flux1", sizes={"B": batch, "H": height}) for batch in (1, 2) for height in (512, 1024)]
    assert [(scaling.batches, "H 512" in scaling.title) for scaling in found(both)] == [((1, 2), True), ((1, 2), False)]


def test_it_stands_in_both_pages() -> None:
    report = build_report(RECORDS)
    assert "| mode | batch 1 | batch 2 | batch 4 |" in markdown(report)
    assert "| none | 2 / 10.00 | **2.5 / 18.00** | OOM |" in markdown(report)
    assert "<td>2 / 10.00</td><td><b>2.5 / 18.00</b></td><td>OOM</td>" in html(report)
