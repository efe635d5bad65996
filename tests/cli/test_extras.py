"""A library that is not installed is told with the extra that has it."""

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import _as_known, app
from lowtide.cli.extras import extra_with


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("diffusers", "diffusers"),
        ("transformers.models", "diffusers"),
        ("peft", "train"),
        ("PIL.Image", "train"),
        ("matplotlib", "bench"),
        ("torchao.quantization", "quant"),
        ("pytest", None),
        ("torch_of_nobody", None),
    ],
)
def test_the_smallest_extra_that_has_a_library(module: str, extra: str | None) -> None:
    assert extra_with(module) == extra


def test_a_command_that_misses_a_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'peft'", name="peft")

    monkeypatch.setattr("lowtide.measure.catalogue.describe_families", missing)
    result = CliRunner().invoke(app, ["families"])
    assert (result.exit_code, result.stdout) == (3, "")
    assert "error: this needs peft, which is not installed. Install it with: pip install" in result.stderr


def test_a_missing_library_is_one_line_and_a_missing_module_of_ours_a_bug() -> None:
    known = _as_known(ModuleNotFoundError("No module named 'peft'", name="peft"))
    assert known is not None and known.exit_code == 3
    assert str(known) == "this needs peft, which is not installed. Install it with: pip install 'lowtide[train]'"
    assert _as_known(ModuleNotFoundError("No module named 'lowtide.gone'", name="lowtide.gone")) is None
