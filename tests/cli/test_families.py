"""``lowtide families``: what it lists, and that it is what the models have."""

from collections.abc import Callable
from typing import Any

import pytest

from lowtide import families
from lowtide.controls import BACKENDS
from lowtide.measure.catalogue import difference

KEYS = {
    *("key", "title", "class", "aliases", "stacks", "scopes", "semantics", "block_classes"),
    *("parameters", "published", "difference"),
}
MICRO_BLOCKS = {"sdxl", "kolors", "sd15", "stable_cascade_c"}


def test_json_has_every_family_with_the_depths_of_its_real_configuration(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("families")
    assert list(result) == ["families"]
    rows = {row["key"]: row for row in result["families"]}
    assert list(rows) == [family.key for family in families.all_families()]
    for row in rows.values():
        assert set(row) == KEYS
        assert row["scopes"] == list(BACKENDS)
        for stack in row["stacks"]:
            assert set(stack) == {"path", "blocks", "depth", "unit", "ffn", "attention"}
            assert stack["depth"] > 0
    flux = rows["flux1"]
    assert flux["class"] == "diffusers.FluxTransformer2DModel"
    assert [(stack["path"], stack["depth"]) for stack in flux["stacks"]] == [
        ("transformer_blocks", 19),
        ("single_transformer_blocks", 38),
    ]
    assert flux["stacks"][1]["ffn"] == ["proj_mlp", "act_mlp", "proj_out"]
    assert rows["sdxl"]["stacks"][0]["depth"] == 87
    assert {key for key, row in rows.items() if row["semantics"]["unit"] == "micro-block"} == MICRO_BLOCKS
    assert rows["sdxl"]["semantics"]["interval"] == "segments of n neighbouring micro-blocks in call order"
    assert flux["semantics"]["segment_stride_ffn"] == "the feed-forward side of block i, if i mod s < n"
    assert flux["block_classes"] == ["FluxTransformerBlock", "FluxSingleTransformerBlock"]
    for family in families.all_families():
        row = rows[family.key]
        assert abs(row["parameters"] - family.parameters) <= 0.01 * family.parameters
        assert row["published"] == family.published
    assert rows["flux1"]["difference"] is None
    assert rows["wan21_14b"]["difference"] == "rounded"
    assert rows["prx"]["difference"] == "the released transformer counts 1.17B"


def test_a_count_that_nothing_explains_is_an_error() -> None:
    assert difference("860M", 859_520_964) is None
    with pytest.raises(ValueError, match="1,418,996,800 parameters are not the published 1.3B"):
        difference("1.3B", 1_418_996_800)
    with pytest.raises(ValueError, match="'large' is no size"):
        difference("large", 1)


def test_people_see_every_family(lowtide: Callable[..., Any]) -> None:
    result = lowtide("families")
    assert result.exit_code == 0
    for family in families.all_families():
        assert family.key in result.stdout
        assert family.title.split()[0] in result.stdout
    assert "38 single_transformer_blocks" in result.stdout
    assert f"Backends: {', '.join(BACKENDS)}; all where the table names none." in " ".join(result.stdout.split())


def test_people_see_aliases(lowtide: Callable[..., Any]) -> None:
    result = lowtide("families", "--aliases")
    words = " ".join(result.stdout.split())
    assert "flux, FLUX.1-dev, FLUX.1-schnell" in words
    assert "38 single_transformer_blocks" not in words


def test_nothing_but_the_table_is_said(process: Callable[..., Any]) -> None:
    result = process("-W", "default::FutureWarning", "-m", "lowtide", "families")
    assert result.returncode == 0
    assert "FluxPosEmbed" not in result.stderr
