"""What blocks keep under autocast, as a card showed it (benchmarks/autocast_bytes.py), is what a plan says of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.measure import casting
from lowtide.measure.cards import find_card
from lowtide.measure.gpu_kernels import GpuKernels
from lowtide.measure.planning import Wish, plain_bytes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "autocast_bytes.jsonl"
LINES = [json.loads(line) for line in RESULTS.read_text().splitlines()]
RANKS = {"lora": 16, "full": None}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['work']}-{line['trained']}")
def test_a_forecast_is_within_a_percent_of_the_probe(line: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert line["torch"].startswith("2.11")
    monkeypatch.setattr(casting, "casts_rms_norm", lambda: False)
    wish = Wish(line["work"], 2**50, find_card(line["card"]), line["sizes"], rank=RANKS[line["trained"]])
    found = {stack: sum(each) for stack, each in plain_bytes(wish).items()}
    assert found == pytest.approx({stack: sum(each) for stack, each in line["probed_bytes"].items()}, rel=0.01)


def saved(input: torch.Tensor, weight: torch.Tensor, *modes: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """By an RMS norm, largest last. modes: entered in this order."""
    found = []
    for mode in modes:
        mode.__enter__()
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda one: one):
            torch.nn.functional.rms_norm(input, weight.shape, weight, 1e-6)
    finally:
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
    distinct = {tensor.untyped_storage()._cdata: tensor for tensor in found}
    return sorted(((tensor.shape, tensor.dtype) for tensor in distinct.values()), key=lambda one: one[0].numel())


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def test_a_norm_in_one_precision_saves_its_input_and_a_value_a_row() -> None:
    x, weight = meta(64, 32, dtype=torch.bfloat16), meta(32, dtype=torch.bfloat16)
    assert saved(x, weight, GpuKernels()) == [
        ((32,), torch.bfloat16),
        ((64, 1), torch.float32),
        ((64, 32), torch.bfloat16),
    ]


def test_a_norm_whose_weight_is_wider_is_composed_as_no_kernel_takes_it() -> None:
    x, weight = meta(64, 32, dtype=torch.bfloat16), meta(32, dtype=torch.float32)
    wide = ((64, 32), torch.float32)
    assert saved(x, weight, GpuKernels())[-2:] == [wide, wide]


@pytest.mark.parametrize("cast", [True, False])
def test_what_autocast_does_to_a_norm_is_up_to_torch(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting, "casts_rms_norm", lambda: cast)
    x, weight = meta(64, 32, dtype=torch.bfloat16), meta(32, dtype=torch.bfloat16)
    found = saved(x, weight, casting.Casting(torch.device("cuda")), GpuKernels())
    assert found[-1] == ((64, 32), torch.float32 if cast else torch.bfloat16)
    assert len(found) == 3


def test_it_is_asked_of_torch_itself() -> None:
    known = torch._C._dispatch_has_kernel_for_dispatch_key("aten::layer_norm", "AutocastCUDA")
    assert known
    assert isinstance(casting.casts_rms_norm(), bool)
