"""The frontier plot: which points are in it, and that names do not cover each other."""

from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text

from lowtide.bench.plot import draw, pareto, sheets
from lowtide.bench.report import build_report
from tests.bench.records import EVERY_STATE, ok

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
        ok(shape, mode, compile=how) for shape in SHAPES for mode in ("none", "layer") for how in ("off", "regional")
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
    (sheet,) = sheets(
        build_report([ok(mode=mode) for mode in ("none", "torch-checkpoint", "diffusers", "layer", "ffn")])
    )
    figure = draw(sheet)
    marks = {line.get_marker() for line in figure.axes[0].lines[1:]}
    assert len(marks) == 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("nothing recomputed", "torch's own checkpoint", "diffusers' own checkpointing", "lowtide", "Pareto frontier"),
    ]


def test_names_cover_neither_each_other_nor_leave_the_panel() -> None:
    records = [ok("16x4096", mode, step_s, peak_gib) for mode, (step_s, peak_gib) in CROWD.items()]
    (sheet,) = sheets(build_report(records))
    figure = draw(sheet)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the point
    assert len(boxes) == len(CROWD)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    frame = axes.bbox
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)


def test_runs_that_disagree_are_marked() -> None:
    (sheet,) = sheets(build_report([ok(step_s=1.0), ok(step_s=2.0)]))
    assert names(draw(sheet)) == [["layer (?)"]]


def test_no_results_no_plot() -> None:
    assert list(sheets(build_report([record for record in EVERY_STATE if record.state != "ok"]))) == []
