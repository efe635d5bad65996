"""Documentation and help are generated from the one place where a key is explained."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field

from lowtide.cli.option_docs import help_of, main, markdown_table, up_to_date
from lowtide.controls import BACKENDS, CheckpointConfig
from lowtide.keys import Choice, Keys

DOCS = Path(__file__).parents[2] / "docs"


class Small(Keys):
    colour: Annotated[str, BeforeValidator(Choice(("red", "blue")))] = Field(
        default="red", description="Of `it` | all."
    )
    plain: bool = Field(default=False, description="A type without words of its own.")


def test_a_table_of_every_key() -> None:
    assert markdown_table(Small).splitlines() == [
        "| key | allowed | default | meaning |",
        "| --- | --- | --- | --- |",
        "| `colour` | red, blue | `red` | Of `it` \\| all. |",
        "| `plain` | bool | false | A type without words of its own. |",
    ]


def test_keys_with_two_names_show_both() -> None:
    table = markdown_table(CheckpointConfig)
    assert "| `gradient_checkpointing_interval` | `interval` | a whole number, 1 or more | unset | " in table
    assert f"| `gradient_checkpointing_backend` | `backend` | {', '.join(BACKENDS)}, auto | `torch` | " in table
    assert "| `gradient_checkpointing_offload_attention` | `offload_attention` | true or false " in table


def test_files_are_brought_up_to_date(tmp_path: Path) -> None:
    name = f"{CheckpointConfig.__module__}.{CheckpointConfig.__name__}"
    page = tmp_path / "page.md"
    page.write_text(f"Before\n<!-- keys: {name} -->\nold\n<!-- end of keys -->\nAfter\n", encoding="utf-8")
    main([str(page)])
    text = page.read_text(encoding="utf-8")
    assert text == f"Before\n<!-- keys: {name} -->\n{markdown_table(CheckpointConfig)}<!-- end of keys -->\nAfter\n"
    assert up_to_date(text) == text


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_documentation_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert up_to_date(text) == text, f"run: python -m lowtide.cli.option_docs {page}"


def test_the_controls_page_has_the_table() -> None:
    assert markdown_table(CheckpointConfig) in (DOCS / "controls.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_help_explains_the_controls_in_the_same_words(lowtide: Callable[..., Any], command: str) -> None:
    result = lowtide(command, "--help")
    words = " ".join(result.stdout.replace("│", " ").split())
    for field in ("interval", "segment_stride", "offload_attention"):
        assert help_of(CheckpointConfig, field) in words
    assert help_of(CheckpointConfig, "backend").partition(". ")[0] in words
