"""The README can be followed: its commands exist, its links lead somewhere, its Python runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from typer.testing import CliRunner

from lowtide import families
from lowtide.cli.app import app
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.testing import cpu_offload

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def code(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Arguments of every call of ``program`` in the README's shell blocks."""
    lines = [shlex.split(line, comments=True) for block in code("sh") for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == program]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden + scale * torch.nn.functional.gelu(self.linear(hidden))


def reader() -> dict[str, Any]:
    """What a reader of the README has at hand: a model with a LoRA, an optimizer, batches, a loss."""
    family = families.find("flux1")
    model: Any = build_model(family, "tiny")
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return {
        "model": model,
        "batches": [build_inputs(family.tiny, torch.float32, seed, {}) for seed in range(2)],
        "training_loss": lambda model, batch: model(**batch).sample.square().mean(),
        "optimizer": torch.optim.SGD(trained, lr=1e-3),
        "block": Block(8),
        "hidden": torch.randn(2, 8, requires_grad=True),
    }


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = [words[0] for words in commands("make")]
    assert named == ["quickstart", "test"]
    assert set(named) <= set(targets)


def test_ci_runs_the_readme_s_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_python_runs_in_the_order_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code("python")
    names = reader()
    model = names["model"]
    classes = [type(module) for module in model.modules()]
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(blocks) == 3
    assert (
        names["receipt"].totals["recompute_calls"] == sum(b.treatment == "whole" for b in names["receipt"].blocks) > 0
    )
    assert "'recompute_calls': " in printed[0]
    assert [type(module) for module in model.modules()] == classes, "the README leaves the model attached"
    assert names["block"].linear.weight.grad is not None


def test_python_of_the_engine_page_runs() -> None:
    (block,) = code("python", (ROOT / "docs" / "engine.md").read_text(encoding="utf-8"))
    names = reader()
    names["training_loss"](names["model"], names["batches"][0]).backward()
    exec(compile(block, "engine.md", "exec"), names)


def test_python_of_the_offload_page_runs() -> None:
    blocks = code("python", (ROOT / "docs" / "offload.md").read_text(encoding="utf-8"))
    names = reader()
    with cpu_offload():
        for block in blocks:
            exec(compile(block, "offload.md", "exec"), names)
    assert len(blocks) == 4


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands("lowtide")])
def test_command_is_understood(words: list[str]) -> None:
    """Run as it stands; of ``train``, ``cache`` and ``bench``, which need the reader's model or card, the help and the
    options."""
    options = [word for word in words if word.startswith("--")]
    if words[0] in ("train", "cache"):
        assert (ROOT / words[1]).is_file()
    if words[0] in ("train", "cache", "bench"):
        words = [*words[: 1 + (words[0] == "bench")], "--help"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert words[-1] != "--help" or all(option in result.output for option in options)


def test_installable_extras_exist() -> None:
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = [extra for words in commands("pip") for extra in re.findall(r"\[(\w+)\]", words[1])]
    assert extras == ["diffusers", "train", "bench"]
    assert all(re.search(rf"^{extra} = \[", metadata, flags=re.MULTILINE) for extra in extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
