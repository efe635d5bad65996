"""``backend="auto"`` on a CUDA card: budgets hold, predictions do, and a step that ran out of memory costs no more than
itself."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lowtide
from lowtide.auto.handle import AutoHandle
from lowtide.auto.measuring import MOST_STEPS
from lowtide.bench.synthetic import Synthetic
from lowtide.plan.costs import MEASURED

DEPTH, WIDTH, HEADS, TOKENS = 12, 1024, 8, 16384
WITHIN = 0.02
BEFORE = 0.05
"""Before a schedule has run."""
GIB = 2**30


@dataclass
class Training:
    """Updates change no weight, but make the states that they need."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).float().square().mean().backward()
        self.optimizer.step()


@pytest.fixture
def training() -> Iterator[Training]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Synthetic(DEPTH, WIDTH, HEADS)).to("cuda", torch.bfloat16)
    yield Training(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True))
    gc.collect()
    torch.cuda.empty_cache()


def inputs() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)


def peaks(training: Training, x: torch.Tensor) -> tuple[int, int]:
    """Allocated and reserved, at most, of a step from empty caches."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training.step(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def attached(model: nn.Module, budget_bytes: int) -> AutoHandle:
    handle = lowtide.attach(model, backend="auto", vram_budget=budget_bytes)
    assert isinstance(handle, AutoHandle)
    return handle


def bounds(training: Training, x: torch.Tensor) -> tuple[int, int]:
    """What is reserved at least, and by the plain run."""
    training.step(x)
    with lowtide.attach(training.model, backend="unsloth"):
        training.step(x)
        _, least = peaks(training, x)
    _, most = peaks(training, x)
    return least, most


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3, 0.6, 0.9])
def test_a_budget_holds_in_every_step_and_the_peak_is_the_predicted_one(training: Training, share: float) -> None:
    x = inputs()
    least, most = bounds(training, x)
    budget = int(least + share * (most - least) + 0.03 * least)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved = []
    with attached(training.model, budget) as handle:
        for _ in range(MOST_STEPS):
            training.step(x)
            reserved.append(torch.cuda.max_memory_reserved())
            if handle.settled:
                break
        assert handle.settled and handle.plan is not None and not handle.plan.leaves_off
        found, _ = peaks(training, x)
        known = handle.plan.prediction
        assert abs(known.peak_bytes / found - 1) <= WITHIN
        before = handle.plan.foreseen or known  # of copies in flight as many count as have ever needed room
        assert -WITHIN <= before.peak_bytes / found - 1 <= BEFORE
    assert max(reserved) <= budget


def test_what_blocks_keep_is_what_the_forecast_says_beside_copies_that_are_on_their_way(training: Training) -> None:
    x = inputs()
    least, most = bounds(training, x)
    with attached(training.model, least + (most - least) // 2) as handle:
        forecast = None
        for _ in range(MOST_STEPS):
            training.step(x)
            assert handle._planner is not None and handle._planner.costs is not None
            forecast = forecast or handle._planner.costs
        costs = handle._planner.costs if handle._planner is not None else None
    assert costs is not None and forecast is not None and costs.source == MEASURED
    for name, kind in costs.kinds.items():
        for cost in kind.treatments:
            if cost.blocks == 1 and not cost.moves:
                expected = forecast.kinds[name].by_way[cost.treatment, cost.moves, 1].kept_bytes
                assert cost.kept_bytes == pytest.approx(expected, rel=0.01), cost.treatment


def test_after_a_step_that_ran_out_of_memory_training_goes_on_with_more_left_free(training: Training) -> None:
    x = inputs()
    least, most = bounds(training, x)
    budget = least + (most - least) // 3
    with attached(training.model, budget) as handle:
        training.step(x)
        training.step(x)
        assert not handle.settled

        def too_much(gradient: torch.Tensor) -> None:
            torch.empty(2 * budget, dtype=torch.uint8, device="cuda")

        output = training.model(x)
        output.register_hook(too_much)
        with pytest.raises(torch.OutOfMemoryError):
            output.float().square().mean().backward()
        del output
        for _ in range(MOST_STEPS):
            training.step(x)
            if handle.settled:
                break
        assert handle.settled
        assert handle._planner is not None and handle._planner.ceiling_bytes is not None


def test_the_gradients_are_those_of_a_plain_run_whatever_is_tried(training: Training) -> None:
    x = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        least, most = bounds(training, x)
        training.step(x)
        plain = [weight.grad for weight in training.model.parameters()]
        schedules = set()
        with attached(training.model, least + (most - least) // 3) as handle:
            for _ in range(MOST_STEPS):
                training.step(x)
                schedules.add(str(handle.schedule))
                for weight, expected in zip(training.model.parameters(), plain, strict=True):
                    assert weight.grad is not None and expected is not None and torch.equal(weight.grad, expected)
        assert len(schedules) > 2
    finally:
        torch.use_deterministic_algorithms(False)
