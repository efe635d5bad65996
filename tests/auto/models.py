"""Models that ``auto`` is attached to in tests, and budgets for them."""

from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.auto.handle import AutoHandle
from lowtide.auto.measuring import _ROUNDS, _TIMED, MOST_STEPS
from lowtide.auto.planner import Planner
from lowtide.plan.solve import smallest_peak, solve
from tests.runtime.toys import Block, Chain

ROUNDS = ((2, 0.05),)
STEPS = MOST_STEPS - (1 + _TIMED) * (sum(most for most, _ in _ROUNDS) - sum(most for most, _ in ROUNDS)) + 2
"""More than ``auto`` measures where plans run again in no more than one round (fixture ``one_round``)."""


def peaks(model: nn.Module, stacks: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """The least that a schedule reaches, and what the plain run takes, by forecast."""
    planner = Planner(model, stacks, torch.device("cpu"), 2**40, 1, can_move=True)
    planner.forecast(args, kwargs)
    assert planner.costs is not None
    return smallest_peak(planner.costs).peak_bytes, solve(planner.costs, 2**40).prediction.peak_bytes


def attached(model: nn.Module, budget_bytes: int) -> AutoHandle:
    handle = lowtide.attach(model, backend="auto", vram_budget=budget_bytes, offload_min_bytes=1)
    assert isinstance(handle, AutoHandle)
    return handle


def dropping(depth: int = 12) -> Chain:
    torch.manual_seed(0)
    return Chain([Block(64, dropout=0.3) for _ in range(depth)])


def budget_for(model: nn.Module, x: torch.Tensor) -> int:
    least, most = peaks(model, None, x)
    return least + (most - least) // 3
