"""What the two-rank scenarios share: models, steps, comparisons, and the loop that runs them in one process group.

A script of scenarios is started once a rank (see test_distributed.py). A scenario raises where something is wrong; the
first failure ends the rank with its traceback, so that no other rank is kept waiting in a collective.
"""

import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import lowtide
from lowtide.measure.parity import fresh, loss_of
from tests.integration import models

Gradients = dict[str, torch.Tensor]
Scenario = Callable[[], None]

SETTINGS = ({"interval": 1}, {"interval": 2}, {"interval": 4}, {"interval": 2, "segment_stride": 4})


def inputs(key: str, number: int = 0) -> dict[str, Any]:
    """Arguments of a forward; every rank and micro-batch has its own values."""
    return models.inputs(key, seed=10 * number + dist.get_rank())


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return loss_of(model(**fresh(batch)))


def step(model: nn.Module, key: str) -> Gradients:
    """One forward and backward; gradients by the name that the parameter has without wrappers."""
    model.zero_grad(set_to_none=True)
    loss(model, inputs(key)).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            plain = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[models.unwrapped(name)] = plain.clone()
    assert found, "no parameter got a gradient"
    return found


def assert_equal(expected: Gradients, found: Gradients) -> None:
    """Bit for bit."""
    assert expected.keys() == found.keys(), set(expected) ^ set(found)
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"{len(different)} of {len(expected)} gradients differ: {different[:5]}"


def assert_ranks_agree(found: Gradients) -> None:
    mine = torch.cat([gradient.flatten() for gradient in found.values()])
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert torch.equal(others[0], others[1]), "ranks ended the step with different gradients"


def assert_recomputed_as_scheduled(
    handle: lowtide.Handle, interval: int, segment_stride: int | None = None, backend: str = "torch"
) -> None:
    """Every scheduled block ran again exactly once, no other did, and segments are as wide as they were asked to be."""
    receipt = handle.receipt()
    for block in receipt.blocks:
        if backend == "torch-ffn":
            treated = block.index % (segment_stride or interval) < (interval if segment_stride else 1)
        else:
            treated = segment_stride is None or block.index % segment_stride < interval
        assert block.recompute_calls == treated, block
    assert not receipt.fallbacks, receipt.fallbacks
    if backend == "torch":
        segments = [block.segment for block in receipt.blocks if block.segment is not None]
        assert max(segments.count(number) for number in segments) == interval
        assert receipt.totals["recomputed_bytes"] > 0


def run(scenarios: Iterable[Scenario]) -> None:
    """Run the scenarios in order; print a line for each that held. The rank comes from torchrun's environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in scenarios:
        scenario()
        print(f"held: {scenario.__name__}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # all is done: a thread of gloo's that still runs at a proper end sometimes aborts the process
