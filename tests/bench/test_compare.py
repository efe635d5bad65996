"""A against B: what is worse beyond noise, and what is not."""

import pytest

from lowtide.bench.compare import Change, Comparison, compare
from lowtide.bench.record import Record
from tests.bench.records import GIB, INERT, bad, ok, receipt


def changed(a: list[Record], b: list[Record]) -> list[tuple[str, str, str, str]]:
    return [(change.kind, change.what, change.before, change.after) for change in compare(a, b).changes]


def test_a_slower_time_beyond_both_spreads_is_a_regression() -> None:
    a, b = [ok(step_s=1.0, spread_s=0.05)], [ok(step_s=1.1, spread_s=0.08)]
    assert changed(a, b) == [("regression", "time", "1.000 s ± 0.05 in 5 steps", "1.100 s ± 0.08 in 5 steps (+10.0 %)")]
    assert changed(b, a) == [("improvement", "time", "1.100 s ± 0.08 in 5 steps", "1.000 s ± 0.05 in 5 steps (-9.1 %)")]


def test_each_budget_of_auto_is_compared_with_itself() -> None:
    a, b = ([ok(mode="auto", step_s=step_s, vram_budget=size * GIB) for size in (8, 12)] for step_s in (1.0, 2.0))
    found = compare(a, [b[0], a[1]])
    assert [(change.kind, change.mode) for change in found.changes] == [("regression", "auto (8 GiB)")]
    assert (found.compared, found.unchanged) == (2, 1)


@pytest.mark.parametrize(("spread_a_s", "spread_b_s"), [(0.12, 0.01), (0.01, 0.12)])
def test_within_the_spread_of_either_nothing_changed(spread_a_s: float, spread_b_s: float) -> None:
    result = compare([ok(step_s=1.0, spread_s=spread_a_s)], [ok(step_s=1.1, spread_s=spread_b_s)])
    assert result == Comparison((), 1, 1)


def test_what_runs_of_a_cell_differ_by_is_noise_too() -> None:
    a = [ok(step_s=1.0, spread_s=0.01), ok(step_s=1.2, spread_s=0.01)]
    assert compare(a, [ok(step_s=1.25, spread_s=0.01)]).changes == ()
    assert [change.kind for change in compare(a, [ok(step_s=1.4, spread_s=0.01)]).changes] == ["regression"]


def test_a_single_step_states_no_spread_and_is_not_judged() -> None:
    result = compare([ok(step_s=1.0, steps=1)], [ok(step_s=5.0)])
    assert [change.kind for change in result.changes] == ["unjudged"]
    assert result.regressions == ()


def test_peaks_differ_by_more_than_a_percent() -> None:
    assert changed([ok(peak_gib=8.0)], [ok(peak_gib=8.07)]) == []
    assert changed([ok(peak_gib=8.0)], [ok(peak_gib=8.2)]) == [("regression", "peak", "8.00 GiB", "8.20 GiB (+2.5 %)")]
    assert changed([ok(peak_gib=8.2)], [ok(peak_gib=8.0)]) == [("improvement", "peak", "8.20 GiB", "8.00 GiB (-2.4 %)")]
    assert changed([ok(peak_gib=8.0), ok(peak_gib=8.5)], [ok(peak_gib=8.8)]) == []


def test_one_cell_may_have_both() -> None:
    assert [what for _, what, *_ in changed([ok(step_s=1.0, peak_gib=8)], [ok(step_s=2.0, peak_gib=6)])] == [
        "time",
        "peak",
    ]


def test_cells_that_appear_and_vanish() -> None:
    a, b = [ok(mode="layer"), ok(mode="none")], [ok(mode="none"), bad("oom", "ffn")]
    assert changed(a, b) == [
        ("new", "state", "not run", "OOM"),
        ("vanished", "state", "1.000 / 8.00", "not run"),
    ]
    assert compare(a, b).unchanged == 1


def test_a_result_that_is_none_any_more_is_a_regression() -> None:
    assert changed([ok()], [bad("oom", "layer")]) == [("regression", "state", "1.000 / 8.00", "OOM")]
    inert = ok(mode="layer-offload", receipt=INERT)
    assert changed([ok(mode="layer-offload", receipt=receipt())], [inert]) == [
        ("regression", "state", "1.000 / 8.00", "inert (offload_attention: attention is recomputed)")
    ]
    assert changed([bad("failed", "layer", "boom")], [ok()]) == [
        ("improvement", "state", "failed (boom)", "1.000 / 8.00")
    ]
    assert changed([bad("failed", "layer", "boom")], [bad("oom", "layer")]) == [
        ("changed", "state", "failed (boom)", "OOM")
    ]


def test_figures_of_inert_cells_are_not_compared() -> None:
    slow, fast = (ok(step_s=step_s, receipt=INERT) for step_s in (9.0, 1.0))
    assert compare([fast], [slow]) == Comparison((), 1, 1)


def test_other_cards_and_conditions_are_other_cells() -> None:
    b = [ok(step_s=9.0, machine={"card": "NVIDIA L40S"})]
    assert [change.kind for change in compare([ok()], b).changes] == ["new", "vanished"]
    assert [change.kind for change in compare([ok()], [ok(sizes={"B": 4})]).changes] == ["new", "vanished"]


def test_what_few_steps_say_is_told() -> None:
    (change,) = compare([ok(step_s=1.0, steps=2)], [ok(step_s=2.0, steps=10), ok(step_s=2.0, steps=3)]).changes
    assert change.before == "1.000 s ± 0 in only 2 steps"
    assert change.after == "2.000 s ± 0 in only 10 + 3 steps (+100.0 %)"


def test_where_no_cell_is_in_both_it_says_in_what_all_differ() -> None:
    a = [ok("sdxl", "layer", sizes={"B": 1}), ok("sdxl", "none")]
    b = [ok("sdxl", mode, machine={"card": "NVIDIA L40S"}, rank=4) for mode in ("none", "layer")]
    assert (compare(a, b).compared, compare(a, b).apart) == (
        0,
        ("card: H200 in A, L40S in B", "trained: LoRA 16 in A, LoRA 4 in B"),
    )
    assert (compare(a, [*b, a[0]]).compared, compare(a, [*b, a[0]]).apart) == (1, ())
    crossed = compare([ok(mode="layer"), ok(mode="none", rank=4)], [ok(mode="none"), ok(mode="layer", rank=4)])
    assert (crossed.compared, crossed.apart) == (0, ())


def test_long_lists_of_what_differs_are_cut() -> None:
    apart = compare([ok(mode=mode) for mode in "abcdef"], [ok(mode="none")]).apart
    assert apart == ("mode: a, b, c, d and 2 more in A, none in B",)


def test_a_change_says_where() -> None:
    (change,) = compare([ok("16x4096", "ffn")], [ok("16x4096", "ffn", step_s=3.0)]).regressions
    assert change == Change(
        kind="regression",
        what="time",
        work="16 blocks × 4096 tokens",
        mode="ffn",
        condition="H200, bf16, frozen, no compile, default attention",
        before="1.000 s ± 0 in 5 steps",
        after="3.000 s ± 0 in 5 steps (+200.0 %)",
    )
