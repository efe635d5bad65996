"""``backend="auto"`` on a CUDA card: budgets hold, predictions do, and a step that ran out of memory costs no more than
itself."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.auto.handle import AutoHandle
from lowtide.bench.synthetic import Synthetic
from lowtide.plan.costs import MEASURED

DEPTH, WIDTH, HEADS, TOKENS = 12, 1024, 8, 16384
MOST_STEPS = 26
WITHIN = 0.02
GIB = 2**30


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield Synthetic(DEPTH, WIDTH, HEADS).to("cuda", torch.bfloat16)
    gc.collect()
    torch.cuda.empty_cache()


def inputs() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).float().square().mean().backward()


def peaks(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Allocated and reserved, at most, of a step from empty caches."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(model, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def attached(model: nn.Module, budget_bytes: int) -> AutoHandle:
    handle = lowtide.attach(model, backend="auto", vram_budget=budget_bytes)
    assert isinstance(handle, AutoHandle)
    return handle


def bounds(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """What is reserved at least, and by the plain run."""
    step(model, x)
    with lowtide.attach(model, backend="unsloth"):
        step(model, x)
        _, least = peaks(model, x)
    _, most = peaks(model, x)
    return least, most


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3, 0.6, 0.9])
def test_a_budget_holds_in_every_step_and_the_peak_is_the_predicted_one(model: nn.Module, share: float) -> None:
    x = inputs()
    least, most = bounds(model, x)
    budget = int(least + share * (most - least) + 0.03 * least)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved = []
    with attached(model, budget) as handle:
        for _ in range(MOST_STEPS):
            step(model, x)
            reserved.append(torch.cuda.max_memory_reserved())
            if handle.settled:
                break
        assert handle.settled and handle.plan is not None and not handle.plan.leaves_off
        found, _ = peaks(model, x)
        assert abs(handle.plan.prediction.peak_bytes / found - 1) <= WITHIN
    assert max(reserved) <= budget


def test_what_blocks_keep_is_what_the_forecast_says_beside_copies_that_are_on_their_way(model: nn.Module) -> None:
    x = inputs()
    least, most = bounds(model, x)
    with attached(model, least + (most - least) // 2) as handle:
        forecast = None
        for _ in range(MOST_STEPS):
            step(model, x)
            assert handle._planner is not None and handle._planner.costs is not None
            forecast = forecast or handle._planner.costs
        costs = handle._planner.costs if handle._planner is not None else None
    assert costs is not None and forecast is not None and costs.source == MEASURED
    for name, kind in costs.kinds.items():
        for cost in kind.treatments:
            if cost.blocks == 1 and not cost.moves:
                expected = forecast.kinds[name].by_way[cost.treatment, cost.moves, 1].kept_bytes
                assert cost.kept_bytes == pytest.approx(expected, rel=0.01), cost.treatment


def test_after_a_step_that_ran_out_of_memory_training_goes_on_with_more_left_free(model: nn.Module) -> None:
    x = inputs()
    least, most = bounds(model, x)
    budget = least + (most - least) // 3
    with attached(model, budget) as handle:
        step(model, x)
        step(model, x)
        assert not handle.settled

        def too_much(gradient: torch.Tensor) -> None:
            torch.empty(2 * budget, dtype=torch.uint8, device="cuda")

        output = model(x)
        output.register_hook(too_much)
        with pytest.raises(torch.OutOfMemoryError):
            output.float().square().mean().backward()
        del output
        for _ in range(MOST_STEPS):
            step(model, x)
            if handle.settled:
                break
        assert handle.settled
        assert handle._planner is not None and handle._planner.ceiling_bytes is not None


def test_the_gradients_are_those_of_a_plain_run_whatever_is_tried(model: nn.Module) -> None:
    x = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        least, most = bounds(model, x)
        step(model, x)
        plain = [weight.grad for weight in model.parameters()]
        schedules = set()
        with attached(model, least + (most - least) // 3) as handle:
            for _ in range(MOST_STEPS):
                step(model, x)
                schedules.add(str(handle.schedule))
                for weight, expected in zip(model.parameters(), plain, strict=True):
                    assert weight.grad is not None and expected is not None and torch.equal(weight.grad, expected)
        assert len(schedules) > 2
    finally:
        torch.use_deterministic_algorithms(False)
