"""FSDP2 (``fully_shard``) on two ranks: parameters are DTensors that are gathered for a block and freed after it."""

import functools
from typing import Any

import torch
from common import (
    SETTINGS,
    Gradients,
    assert_equal,
    assert_recomputed_as_scheduled,
    build,
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

KEY = "flux1"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLUX_BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in FLUX_BLOCKS]


def shard(model: nn.Module, root_only: bool = False, **policy: Any) -> nn.Module:
    if not root_only:
        found = blocks(model)
        assert len(found) == 14
        for block in found:
            fully_shard(block, **policy)
    return fully_shard(model, **policy)


@functools.cache
def plain(root_only: bool = False, bf16: bool = False) -> Gradients:
    return step(shard(build(KEY), root_only, **_policy(bf16)), KEY)


def _policy(bf16: bool) -> dict[str, Any]:
    return {"mp_policy": BF16} if bf16 else {}


def check(attach_first: bool, root_only: bool = False, bf16: bool = False, **options: Any) -> None:
    model = build(KEY)
    if attach_first:
        handle = lowtide.attach(model, **options)
        model = shard(model, root_only, **_policy(bf16))
    else:
        model = shard(model, root_only, **_policy(bf16))
        handle = lowtide.attach(model, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for _ in range(2):
        assert_equal(plain(root_only, bf16), step(model, KEY))
        assert_recomputed_as_scheduled(handle, **options)
    handle.detach()
    assert_equal(plain(root_only, bf16), step(model, KEY))
    assert {block.recompute_calls for block in handle.receipt().blocks} <= {0, 1}, "detached, nothing is counted"


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


def bf16_mixed_precision() -> None:
    for attach_first in (True, False):
        for interval in (1, 2):
            check(attach_first, bf16=True, interval=interval)


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
    assert gathers(shard(build(KEY))) > 14, "every block is gathered"
    for interval in (1, 2, 4):
        found = gathers(ours(interval))
        assert found <= allowed, f"{found} all-gathers at interval {interval}, {allowed} with torch's checkpoint"


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
            bf16_mixed_precision,
            no_more_all_gathers_than_with_torchs_checkpoint,
        ]
    )
