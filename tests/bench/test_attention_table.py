"""Kernels side by side: what is compared with what, and kernels that cannot run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.bench.attention_table import REFERENCE, cosine, gradients, measure_kernel, write_reference
from lowtide.bench.cell import Effort
from lowtide.bench.record import Condition
from lowtide.bench.sweep import family_conditions
from lowtide.bench.works import build

QUICK = Effort(warm_up=1, steps=2)


def condition(attention: str) -> Condition:
    return next(family_conditions(["sd3_medium"], ["layer"], {}, size="tiny", rank=4, attention=attention))


def test_the_cosine_is_of_all_elements_together() -> None:
    a = torch.tensor([3.0, 4.0])
    assert cosine(a, 2 * a) == pytest.approx(1)
    assert cosine(a, -a) == pytest.approx(-1)
    assert cosine(a, torch.tensor([-4.0, 3.0])) == pytest.approx(0)
    assert cosine(a, torch.tensor([1.0, 0.0])) == pytest.approx(0.6)


def test_the_reference_is_the_same_model_in_float32() -> None:
    rounded, exact = gradients(condition("flash"), "cpu"), gradients(condition("flash"), "cpu", exact=True)
    other_kernel = gradients(condition("math"), "cpu", exact=True)
    trained = build(condition("flash"), "cpu").trained
    assert exact.numel() == rounded.numel() == sum(weight.numel() for weight in trained)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    assert 1 - cosine(exact, other_kernel) < 1e-9
    assert 1e-6 < 1 - cosine(rounded, exact) < 1e-2


def test_a_row_has_its_cell_and_its_cosine(tmp_path: Path) -> None:
    path = tmp_path / "reference.pt"
    assert write_reference(condition("flash"), "cpu", path, 600.0) is None
    assert torch.equal(torch.load(path), gradients(condition("math"), "cpu", exact=True))
    row = measure_kernel(condition("flash"), QUICK, "cpu", {"card": None}, path)
    assert row.record.state == "ok" and row.record.figures is not None
    assert row.cosine == pytest.approx(cosine(gradients(condition("flash"), "cpu"), torch.load(path)))
    line = row.as_dict()
    assert next(iter(line)) == "machine"
    assert (line["tool"], line["gradient_reference"], line["gradient_cosine"]) == ("attention", REFERENCE, row.cosine)
    assert line["condition"]["attention"] == "flash"


def test_a_kernel_that_cannot_run_says_why(tmp_path: Path) -> None:
    row = measure_kernel(condition("cudnn"), QUICK, "cpu", {"card": None}, tmp_path / "none.pt")
    assert row.record.state == "failed"
    assert row.record.reason is not None and "No viable backend for scaled_dot_product_attention" in row.record.reason
    assert (row.cosine, row.why_no_cosine) == (None, None)


def test_without_a_reference_the_figures_stay(tmp_path: Path) -> None:
    why = write_reference(condition("flash"), "cpu", tmp_path / "no folder" / "reference.pt", 600.0)
    assert why is not None and "Parent directory" in why
    row = measure_kernel(condition("math"), QUICK, "cpu", {"card": None}, None)
    assert row.record.state == "ok" and row.cosine is None


def test_a_reference_whose_process_dies_says_so(tmp_path: Path) -> None:
    wrong = replace(condition("flash"), work="no such family")
    assert write_reference(wrong, "cpu", tmp_path / "reference.pt", 600.0) == "its process ended with code 1"
