"""The frontier plot: which points are in it, and that names do not cover each other."""

from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from lowtide.bench.plot import draw, pareto, plots, sheets
from lowtide.bench.record import Record
from lowtide.bench.report import build_report
from tests.bench.records import EVERY_STATE, GIB, bad, ok

SHAPES = ("16x1024", "16x4096", "16x16384", "32x4096")
CROWD = {
    "none": (1.0, 20.0),
    "torch-checkpoint": (1.31, 8.0),
    "layer": (1.305, 8.0),
    "interval2": (1.35, 8.1),
    "ffn": (1.1, 15.0),
    "unsloth": (1.31, 7.5),
    "selective": (1.15, 9.0),
    "selective-offload": (1.16, 7.9),
    "seg2-stride4": (1.17, 14.0),
    "unsloth-ffn": (1.1, 14.5),
    "activation-offload": (1.0, 12.0),
    "auto": (1.02, 9),
}


def spread(*modes: str, **more: Any) -> list[Record]:
    """Each slower than the one before, with a lower peak."""
    return [ok(mode=mode, step_s=1 + 0.1 * at, peak_gib=20 - 2 * at, **more) for at, mode in enumerate(modes)]


def names(figure: Figure) -> list[list[str]]:
    """The names in each panel."""
    return [sorted(text.get_text() for text in axes.texts) for axes in figure.axes]


def test_the_frontier_leaves_out_what_is_beaten() -> None:
    points = [(8.0, 1.3), (20.0, 1.0), (9.0, 1.2), (9.0, 1.25), (10.0, 1.2), (7.9, 1.3)]
    assert pareto(points) == [(7.9, 1.3), (9.0, 1.2), (20.0, 1.0)]


def test_only_results_are_drawn() -> None:
    (sheet,) = sheets(build_report(EVERY_STATE))
    assert names(draw(sheet)) == [["layer", "none", "torch-checkpoint"]]


def test_an_inert_cell_does_not_make_the_frontier() -> None:
    (sheet,) = sheets(build_report(EVERY_STATE))
    frontier = draw(sheet).axes[0].lines[0]
    assert sorted(set(zip(*frontier.get_data(), strict=True))) == [(8.0, 750.0), (30.0, 500.0), (30.0, 750.0)]


def test_synthetic_shapes_are_panels_of_one_figure() -> None:
    records = [
        record
        for shape in SHAPES
        for how in ("off", "regional")
        for record in spread("none", "layer", work=shape, compile=how)
    ]
    found = list(sheets(build_report(records)))
    assert [len(sheet.panels) for sheet in found] == [4, 4]
    assert len({sheet.name for sheet in found}) == 2
    figure = draw(found[0])
    assert [axes.get_title() for axes in figure.axes] == [
        *("16 blocks × 1024 tokens", "16 blocks × 4096 tokens"),
        *("16 blocks × 16384 tokens", "32 blocks × 4096 tokens"),
    ]
    assert len(figure.legends) == 1 and not any(axes.get_legend() for axes in figure.axes)


def test_baselines_have_marks_of_their_own() -> None:
    (sheet,) = sheets(build_report(spread("none", "torch-checkpoint", "diffusers", "layer", "ffn", "unsloth")))
    figure = draw(sheet)
    marks = {line.get_marker() for line in figure.axes[0].lines[1:]}
    assert len(marks) == 5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("nothing recomputed", "torch's own checkpoint", "diffusers' own checkpointing"),
        *("lowtide, recomputation", "lowtide, CPU offload", "Pareto frontier"),
    ]


def test_auto_has_a_mark_of_its_own_whatever_its_budget() -> None:
    budgets = [ok(mode="auto", vram_budget=size * GIB, peak_gib=size) for size in (8, 12)]
    (sheet,) = sheets(
        build_report([ok(mode="none", step_s=0.5, peak_gib=20), ok(mode="layer"), ok(mode="unsloth"), *budgets])
    )
    figure = draw(sheet)
    marks = [line.get_marker() for line in figure.axes[0].lines[1:]]
    assert len(marks) == 5 and len(set(marks)) == 4 and marks[-2:] == ["P", "P"]
    assert {"auto (8 GiB)", "auto (12 GiB)"} <= set(names(figure)[0])
    assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == ["lowtide, auto", "Pareto frontier"]


def crowded() -> list[Record]:
    return [ok("16x4096", mode, step_s, peak_gib) for mode, (step_s, peak_gib) in CROWD.items()]


def test_names_cover_neither_each_other_nor_leave_the_panel() -> None:
    (sheet,) = sheets(build_report(crowded()))
    figure = draw(sheet)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the point
    assert len(boxes) == len(CROWD)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    frame = axes.bbox
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)


def test_what_a_cpu_measured_is_in_no_plot() -> None:
    cpu = {"card": None}
    records = [record for work in ("sdxl", "16x1024") for record in spread("none", "layer", work=work, machine=cpu)]
    batches = [ok("flux1", sizes={"B": batch}, machine={"card": None}) for batch in (1, 2)]
    assert plots(build_report(records + batches)) == []
    assert [sheet.name for sheet in sheets(build_report([*records, *spread("none", "layer", work="sdxl")]))] == [
        "frontier-sdxl"
    ]


def test_plots_whose_names_collide_have_names_of_their_own() -> None:
    works = ["a.b", "a/b", "A B", "1x1", "synthetic"]
    records = [record for work in [*works, "a.b-c"] for record in spread("none", "layer", work=work)]
    found = plots(build_report([*records, *spread("none", "layer", work="a.b", depth={"c": 1})]))
    assert len({picture.name.lower() for picture in found}) == len(found) == 7


def test_names_of_files_stay_short() -> None:
    stacks = {"s" * 90 + str(number): 1 for number in range(9)}
    cut = [record for work in ("ab", "ac") for record in spread("none", "layer", work=work + "w" * 90, depth=stacks)]
    found = [picture.name for picture in plots(build_report([*cut, *cut]))]
    assert len(set(found)) == len(found) == 2 and max(map(len, found)) < 250


def test_without_a_frontier_there_is_no_plot() -> None:
    assert plots(build_report([ok()])) == []
    best = [ok(mode="none", step_s=2.0, peak_gib=20.0), ok(mode="layer", step_s=1.0, peak_gib=8.0)]
    assert plots(build_report(best)) == []
    other = spread("none", "layer", rank=4)
    (sheet,) = sheets(build_report([*best, *other]))
    assert [panel.title for panel in sheet.panels] == ["LoRA 4"]


def test_a_name_with_dollars_is_no_formula() -> None:
    (picture,) = plots(build_report(spread("none", r"a$\frac$", work=r"w$\frac$")))
    assert picture.name == "frontier-w--frac-"


def test_batch_scaling_is_a_plot_where_a_mode_has_results_of_several_batches() -> None:
    records = [record for batch in (1, 2, 4) for record in spread("none", "layer", work="flux1", sizes={"B": batch})]
    found = {picture.name: picture for picture in plots(build_report([*records, bad("oom", "ffn", work="flux1")]))}
    assert list(found) == ["frontier-flux1", "batch-flux1"]
    assert found["batch-flux1"].section == "flux1"
    alone = [ok("flux1", "none", sizes={"B": 1}), ok("flux1", "layer", sizes={"B": 2})]
    assert [picture.name for picture in plots(build_report(alone))] == []


def test_runs_that_disagree_are_marked() -> None:
    (sheet,) = sheets(build_report([ok(step_s=1.0), ok(step_s=2.0), ok(mode="none", peak_gib=20.0)]))
    assert names(draw(sheet)) == [["layer (?)", "none"]]


def test_no_results_no_plot() -> None:
    assert list(sheets(build_report([record for record in EVERY_STATE if record.state != "ok"]))) == []
