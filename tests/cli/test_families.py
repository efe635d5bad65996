"""``lowtide families``: what it lists, and that it is what the models have."""

from collections.abc import Callable
from typing import Any

from lowtide import families
from lowtide.controls import BACKENDS


def test_json_has_every_family_with_the_depths_of_its_real_configuration(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json("families")
    assert list(result) == ["families"]
    rows = {row["key"]: row for row in result["families"]}
    assert list(rows) == [family.key for family in families.all_families()]
    for row in rows.values():
        assert set(row) == {"key", "title", "class", "aliases", "stacks", "scopes", "parameters"}
        assert row["scopes"] == list(BACKENDS)
        for stack in row["stacks"]:
            assert set(stack) == {"path", "blocks", "depth", "ffn", "attention"}
            assert stack["depth"] > 0
    flux = rows["flux1"]
    assert flux["class"] == "diffusers.FluxTransformer2DModel"
    assert [(stack["path"], stack["depth"]) for stack in flux["stacks"]] == [
        ("transformer_blocks", 19),
        ("single_transformer_blocks", 38),
    ]
    assert flux["stacks"][1]["ffn"] == ["proj_mlp", "act_mlp", "proj_out"]
    assert rows["sdxl"]["stacks"][0]["depth"] == 87


def test_people_see_every_family(lowtide: Callable[..., Any]) -> None:
    result = lowtide("families")
    assert result.exit_code == 0
    for family in families.all_families():
        assert family.key in result.stdout
        assert family.title.split()[0] in result.stdout
    assert "38 single_transformer_blocks" in result.stdout
    assert f"Backends: {', '.join(BACKENDS)}; all where the table names none." in " ".join(result.stdout.split())
