"""Public figures: the right ones for a condition, with their card, and in what they differ."""

from typing import Any

import pytest

from lowtide import families
from lowtide.bench.reference import Reference, _data, differences, published, references, source
from tests.bench.records import condition


def by_card(found: tuple[Reference, ...]) -> dict[str, tuple[str, float | None, float | None]]:
    return {entry.card: (entry.state, entry.step_s, entry.peak_gib) for entry in found}


def test_a_family_has_the_figures_of_both_cards() -> None:
    found = references(condition("sd3_medium", "layer"))
    assert by_card(found) == {"H100": ("ok", 0.721, 7.67), "L40S": ("ok", 1.607, 7.62)}
    assert found[0].x_none == pytest.approx(0.721 / 0.529)


def test_states_stand_where_there_are_no_figures() -> None:
    found = references(condition("sd3_medium", "none", precision="fp8-torchao"))
    assert by_card(found) == {"H100": ("OOM", None, None), "L40S": ("OOM", None, None)}


@pytest.mark.parametrize("name", ["sd3_medium", "SD3", "sd3-medium"])
def test_a_work_is_found_by_every_name_of_its_family(name: str) -> None:
    assert len(references(condition(name, "layer"))) == 2


@pytest.mark.parametrize(
    ("work", "mode", "precision"),
    [
        ("flux1", "layer", "bf16"),  # no published row
        ("sd3_medium", "selective", "bf16"),  # a mode of ours
        ("sd3_medium", "torch-checkpoint", "bf16"),
        ("sd3_medium", "layer", "nf4-bnb"),
        ("auraflow", "layer", "fp8-torchao"),  # published as not run
        ("anima", "layer", "bf16"),  # distillation on it is published, which is something else
        ("hunyuan_video", "layer", "bf16"),  # "HunyuanVideo" there is 1.5
        ("cosmos3", "layer", "bf16"),  # "Cosmos 3" there is Edge
        ("something_else", "layer", "bf16"),
        ("8x1024", "layer", "bf16"),
    ],
)
def test_there_is_no_reference(work: str, mode: str, precision: str) -> None:
    assert references(condition(work, mode, precision=precision)) == ()


@pytest.mark.parametrize("kind", ["family", "synthetic"])
def test_nobody_published_auto(kind: str) -> None:
    assert not [work for work in _data(kind)["works"].values() for modes in work["cells"].values() if "auto" in modes]


@pytest.mark.parametrize("other", [{"size": "tiny"}, {"depth": {"transformer_blocks": 6}}])
def test_nothing_is_published_of_a_model_that_is_not_the_real_one(other: dict[str, Any]) -> None:
    assert published(condition("sd3_medium")) is not None
    assert published(condition("sd3_medium", **other)) is None
    assert references(condition("sd3_medium", **other)) == ()
    assert differences(condition("sd3_medium", **other)) == []


def test_titles_that_mean_another_row_than_they_say() -> None:
    assert by_card(references(condition("hunyuan_video_15", "layer")))["H100"] == ("ok", 7.682, 26.35)
    assert by_card(references(condition("cosmos3_edge", "layer")))["H100"] == ("ok", 2.602, 8.9)
    assert by_card(references(condition("stable_cascade_c", "layer")))["H100"] == ("ok", 1.179, 22.68)


@pytest.mark.parametrize(
    ("mode", "step_s", "peak_gib"),
    [
        ("none", 0.0948, 7.43),
        ("ffn", 0.1029, 6.02),
        ("unsloth-ffn", 0.1157, 5.67),
        ("layer", 0.1233, 4.26),
        ("unsloth", 0.1358, 3.93),
    ],
)
def test_synthetic_modes_by_our_names(mode: str, step_s: float, peak_gib: float) -> None:
    assert by_card(references(condition("16x4096", mode)))["H100"] == ("ok", step_s, peak_gib)


def test_synthetic_figures_are_of_frozen_weights_only() -> None:
    assert references(condition("16x4096", "layer", adapter="lora", rank=16)) == ()


def test_a_schedule_that_did_not_act_there_is_told() -> None:
    assert [found.same_peak_as for found in references(condition("qwen_image", "seg2-stride4"))] == ["layer", "layer"]
    assert references(condition("cosmos3_edge", "layer"))[0].same_peak_as == "none"
    assert references(condition("auraflow", "seg2-stride4"))[0].same_peak_as == "interval2"
    assert references(condition("sd3_medium", "seg2-stride4"))[0].same_peak_as is None


def test_differences_from_what_was_published() -> None:
    same = condition("sd3_medium", rank=128, sizes={"B": 3, "H": 1024, "W": 1024})
    assert differences(same) == []
    other = condition("sd3_medium", rank=16, sizes={"B": 1, "H": 512, "W": 512}, compile="regional")
    assert differences(other) == [
        "batch 3 there",
        "1024×1024 pixels there",
        "LoRA 128 there",
        "compile setting not published",
    ]
    assert differences(condition("wan21_1_3b", compile="regional")) == [
        "no compile there",
        "flash-attn-3-hub attention there",
    ]
    assert differences(condition("sdxl", rank=16)) == ["LoKr there"]
    assert differences(condition("flux1")) == []


def test_sources_are_named() -> None:
    assert source("family").startswith("SimpleTuner documentation, segmented checkpointing sweep, August 2026")
    assert source("synthetic").startswith("SimpleTuner documentation")
    work = published(condition("qwen_image_21"))
    assert work and "0.612 s/step at batch 10" in work.remarks[0]


def test_every_published_family_is_a_row_or_known_to_have_none() -> None:
    without = {key for key in _data("family")["works"] if not families.known(key)}
    assert without == {"anima_anyflow", "boogu_image", "heartmula", "longcat_video", "mageflow", "wan_s2v", "zlab_i1"}
    cells = [
        cell
        for work in _data("family")["works"].values()
        for modes in work["cells"].values()
        for cards in modes.values()
        for cell in cards.values()
    ]
    assert len(cells) == 1185
    assert {cell for cell in cells if isinstance(cell, str)} == {"OOM", "failed", "unsupported"}
