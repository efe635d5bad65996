"""FSDP2 (``fully_shard``) on two ranks: parameters are DTensors that are gathered for a block and freed after it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import (
    SETTINGS,
    Gradients,
    assert_equal,
    assert_recomputed_as_scheduled,
    gradients,
    inputs,
    loss,
    run,
    step,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ConfigError
from tests.integration.models import blocks, build

Attached = tuple[nn.Module, lowtide.Handle]

KEY = "flux1"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: nn.Module, root_only: bool = False, **policy: Any) -> nn.Module:
    if not root_only:
        found = blocks(model)
        assert len(found) == 8
        for block in found:
            fully_shard(block, **policy)
    return fully_shard(model, **policy)


@functools.cache
def plain(root_only: bool = False, bf16: bool = False) -> Gradients:
    return step(shard(build(KEY), root_only, **_policy(bf16)), KEY)


def _policy(bf16: bool) -> dict[str, Any]:
    return {"mp_policy": BF16} if bf16 else {}


def attached(attach_first: bool, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> Attached:
    model = build(KEY)
    if attach_first:
        handle = lowtide.attach(model, **options)
        return wrap(model), handle
    return wrap(model), lowtide.attach(model, **options)


def check(attach_first: bool, root_only: bool = False, bf16: bool = False, **options: Any) -> None:
    model, handle = attached(attach_first, lambda model: shard(model, root_only, **_policy(bf16)), **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for _ in range(2):
        assert_equal(plain(root_only, bf16), step(model, KEY))
        assert_recomputed_as_scheduled(handle, **options)


def both_orders_at_every_interval() -> None:
    for attach_first in (True, False):
        for setting in SETTINGS:
            check(attach_first, **setting)


def feed_forward_sides() -> None:
    for attach_first in (True, False):
        check(attach_first, backend="torch-ffn", interval=1)


def root_only() -> None:
    for attach_first in (True, False):
        check(attach_first, root_only=True, interval=2)


class Inside(nn.Module):
    """FSDP2 never frees the weights of its root after forward, so the model is not the root."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def weights_that_move_though_no_block_has_a_hook() -> None:
    """Freed after forward and gathered again for backward at another address."""

    def wrap(model: nn.Module) -> nn.Module:
        return fully_shard(Inside(fully_shard(model, reshard_after_forward=True)))

    expected = step(wrap(build(KEY)), KEY)
    for attach_first in (True, False):
        model, handle = attached(attach_first, wrap, interval=2)
        assert_equal(expected, step(model, KEY))
        assert_recomputed_as_scheduled(handle, interval=2)


def blocks_in_groups() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        found = blocks(model)
        for first, second in zip(found[::2], found[1::2], strict=True):
            fully_shard([first, second])
        return fully_shard(model)

    expected = step(wrap(build(KEY)), KEY)
    for attach_first in (True, False):
        model, handle = attached(attach_first, wrap, interval=4)
        assert_equal(expected, step(model, KEY))
        assert_recomputed_as_scheduled(handle, interval=4)


def bf16_mixed_precision() -> None:
    for attach_first in (True, False):
        check(attach_first, bf16=True, interval=2)


def accumulation_without_synchronising() -> None:
    def accumulated(model: Any) -> Gradients:
        model.zero_grad(set_to_none=True)
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss(model, inputs(KEY, number)).backward()
        return gradients(model)

    expected = accumulated(shard(build(KEY)))
    model, handle = attached(True, shard, interval=2)
    assert_equal(expected, accumulated(model))
    assert_recomputed_as_scheduled(handle, interval=2)


def detached_and_attached_again() -> None:
    for attach_first in (True, False):
        model, handle = attached(attach_first, shard, interval=2)
        step(model, KEY)
        before = handle.receipt()
        handle.detach()
        assert_equal(plain(), step(model, KEY))
        assert handle.receipt() == before, "detached, nothing is recomputed or counted"
        again = lowtide.attach(model, interval=4)
        assert_equal(plain(), step(model, KEY))
        assert_recomputed_as_scheduled(again, interval=4)


def no_more_all_gathers_than_with_torchs_checkpoint() -> None:
    def torchs() -> nn.Module:
        model: Any = build(KEY)
        model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False))
        return shard(model)

    def ours(interval: int) -> nn.Module:
        model = build(KEY)
        lowtide.attach(model, interval=interval)
        return shard(model)

    allowed = gathers(torchs())
    assert gathers(shard(build(KEY))) > 8, "every block is gathered"
    for interval in (1, 4):
        found = gathers(ours(interval))
        assert found <= allowed, f"{found} all-gathers at interval {interval}, {allowed} with torch's checkpoint"


def auto_is_refused() -> None:
    for attach_first in (True, False):
        model, handle = attached(attach_first, shard, backend="auto", vram_budget=2**40)
        with pytest.raises(ConfigError, match="one saved plan"):
            step(model, KEY)
        handle.detach()
        assert_equal(plain(), step(model, KEY))


class CountGathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def gathers(model: nn.Module) -> int:
    """All-gathers of the second step."""
    step(model, KEY)
    with CountGathers() as counted:
        loss(model, inputs(KEY)).backward()
    return counted.count


if __name__ == "__main__":
    run(
        [
            both_orders_at_every_interval,
            feed_forward_sides,
            root_only,
            weights_that_move_though_no_block_has_a_hook,
            blocks_in_groups,
            bf16_mixed_precision,
            accumulation_without_synchronising,
            detached_and_attached_again,
            no_more_all_gathers_than_with_torchs_checkpoint,
            auto_is_refused,
        ]
    )
