"""Host costs: the arithmetic, and that every row of every kind of block is measured."""

import gc

import pytest
import torch

from lowtide.bench.host import GOALS, costs, host_costs
from lowtide.bench.host_works import ATTACHED, PLAIN, TORCH, rows, stacks
from lowtide.testing import cpu_offload

ROWS = {PLAIN, TORCH, "lowtide.checkpoint", *ATTACHED}


def test_costs_are_told_over_plain_and_beside_torch() -> None:
    medians_us = {PLAIN: (100.0, 1.0), TORCH: (300.0, 2.0), "lowtide interval 1": (240.0, 3.0), "other": (400.0, 4.0)}
    plain, torch_row, ours, other = costs({**medians_us, "lowtide unsloth": (360.0, 0.0)})[:4]
    assert (plain.added_us, plain.ratio_to_torch) == (0, 0)
    assert (torch_row.added_us, torch_row.ratio_to_torch, torch_row.lag_us) == (200, 1, 2)
    assert (ours.total_us, ours.added_us, ours.ratio_to_torch, ours.meets_goal) == (240, 140, 0.7, True)
    assert (other.ratio_to_torch, other.goal, other.meets_goal) == (1.5, None, None)
    assert costs({**medians_us, "lowtide unsloth": (360.0, 0.0)})[4].meets_goal is False


def test_every_row_is_measured_and_the_process_left_as_it_was() -> None:
    threads, told = torch.get_num_threads(), []
    found = host_costs("cpu", 1, 2, told.append)
    assert list(found) == told == ["attention + MLP", "FluxTransformerBlock"]
    for measured in found.values():
        assert {cost.row for cost in measured} == ROWS
        assert all(cost.total_us > 0 for cost in measured)
    assert torch.get_num_threads() == threads
    assert gc.isenabled()
    assert set(GOALS) <= ROWS


def test_no_mode_is_around_what_is_measured() -> None:
    """A device's context costs each operator time."""
    modes = [torch.overrides._get_current_function_mode_stack() for _ in stacks(2, "cpu")]
    assert modes == [[], []]


@pytest.mark.parametrize("index", [0, 1])
def test_rows_compute_the_same(index: int) -> None:
    torch.manual_seed(0)
    _, stack, inputs = list(stacks(2, "cpu"))[index]
    with cpu_offload():
        gradients = {}
        for name, (model, call) in rows(stack).items():
            model(call, *inputs).backward()
            gradients[name] = [weight.grad for weight in model.parameters()]
    for name, found in gradients.items():
        for one, plain in zip(found, gradients[PLAIN], strict=True):
            assert plain is None or (one is not None and torch.equal(one, plain)), name
