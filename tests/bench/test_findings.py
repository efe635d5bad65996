"""What comes out of a report, computed by hand."""

from typing import Any

import pytest

from lowtide.bench.findings import findings
from lowtide.bench.record import Record
from lowtide.bench.report import build_report
from tests.bench.records import INERT, bad, ok


def found(*records: Record) -> list[str]:
    return list(findings(build_report(records)))


def test_the_fastest_modes_in_half_of_the_memory_and_what_modes_cost() -> None:
    assert found(
        ok("sdxl", "none", 1.0, 20.0),
        ok("sdxl", "layer", 1.3, 8.0),
        ok("sdxl", "unsloth", 1.2, 10.0),
        ok("sdxl", "ffn", 1.1, 10.1),
        ok("flux1", "none", 2.0, 20.0),
        ok("flux1", "layer", 3.0, 10.0),
        ok("flux1", "unsloth", 0.1, 1.0, receipt=INERT),
        ok("sd15", "none", 1.0, 20.0),
        ok("sd15", "layer", 1.4, 11.0),
        bad("oom", "none", work="sd3_medium"),
        ok("sd3_medium", "layer"),
        ok("16x1024", "none", 1.0, 10.0),
        ok("16x1024", "selective", 1.25, 6.0),
    ) == [
        "Synthetic blocks: of 1 condition, none have a mode within 50% of none's peak.",
        "Synthetic blocks: selective takes 1.25 × none's time and 0.60 × its peak (1 condition).",
        "Families: of 3 conditions, 2 have a mode within 50% of none's peak; the fastest is layer in 1, unsloth in 1.",
        "Families: layer takes 1.40 × none's time and 0.50 × its peak (medians of 3 conditions).",
        "Families: unsloth takes 1.20 × none's time and 0.50 × its peak (1 condition).",
    ]


@pytest.mark.parametrize("more", [{"size": "tiny"}, {"machine": {"card": None}}])
def test_tiny_models_and_cpus_say_nothing(more: dict[str, Any]) -> None:
    assert found(ok(mode="none", **more), ok(**more)) == []


def test_what_stands_alone_says_nothing() -> None:
    assert found(ok(mode="none"), ok("sdxl")) == []
