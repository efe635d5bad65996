"""docs/families.md: its table is that of the last result, and the result is what diffusers does."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowtide import families

ROOT = Path(__file__).parents[1]
ROWS = {row["family"]: row for row in json.loads(
    (ROOT / "benchmarks/results/diffusers_checkpointing.json").read_text(encoding="utf-8")
)["rows"]}  # fmt: skip


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "diffusers_checkpointing", ROOT / "benchmarks/diffusers_checkpointing.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_last_result(benchmark: Any) -> None:
    assert list(ROWS) == [family.key for family in families.all_families()]
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert f"<!-- families -->\n{benchmark.table(list(ROWS.values()))}<!-- end of families -->" in page


@pytest.mark.parametrize(
    ("key", "left", "differs", "error"),
    [
        ("flux1", 0, set(), None),
        ("lumina2", 4, set(), None),
        ("sd15", 1, set(), None),
        ("chroma", 0, {"attention mask"}, None),
        ("hunyuan_image", 0, set(), "TypeError"),
    ],
)
def test_diffusers_does_what_the_result_says(
    benchmark: Any, key: str, left: int, differs: set[str], error: str | None
) -> None:
    found = benchmark.measure(families.find(key))
    assert found == ROWS[key]
    assert sum(len(stack["left"]) for stack in found["stacks"].values()) == left
    assert set(found["differences"]) == differs
    assert found["error"] is None if error is None else found["error"].startswith(error)
