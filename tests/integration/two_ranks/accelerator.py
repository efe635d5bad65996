"""accelerate on two ranks: ``Accelerator.prepare`` with DDP, and its FSDP2 preparation, which wraps blocks by class."""

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from common import (
    Gradients,
    assert_equal,
    assert_ranks_agree,
    assert_recomputed_as_scheduled,
    gradients,
    inputs,
    loss,
    run,
    step,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule

import lowtide
from tests.integration.models import build

KEY = "flux1"
MICRO_BATCHES = 2


def accelerator(**options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, **options)


def prepare(engine: Accelerator, model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return engine.prepare(model, optimizer)[0]


def accumulated(engine: Accelerator, model: nn.Module) -> Gradients:
    model.zero_grad(set_to_none=True)
    for number in range(MICRO_BATCHES):
        with engine.accumulate(model):
            engine.backward(loss(model, inputs(KEY, number)))
    return gradients(model)


def check_prepare(**options: Any) -> None:
    engine = accelerator(**options)
    expected = accumulated(engine, prepare(engine, build(KEY)))
    for attach_first in (True, False):
        original = build(KEY)
        if attach_first:
            handle = lowtide.attach(original, interval=2)
            model = prepare(engine, original)
        else:
            model = prepare(engine, original)
            handle = lowtide.attach(model, interval=2)
        for _ in range(2):
            found = accumulated(engine, model)
            assert_equal(expected, found)
            assert_ranks_agree(found)
            assert_recomputed_as_scheduled(handle, interval=2)
        assert engine.unwrap_model(model) is original
        assert list(engine.get_state_dict(model)) == list(build(KEY).state_dict())
        handle.detach()
        assert_equal(expected, accumulated(engine, model))


def prepare_with_ddp() -> None:
    check_prepare()


def prepare_with_bf16_autocast() -> None:
    check_prepare(mixed_precision="bf16")


def fsdp2_wraps_every_block_by_its_class_name() -> None:
    """accelerate chooses FSDP2 on accelerators only, so its preparation of a model is called by name."""
    engine = accelerator()
    engine.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["FluxTransformerBlock", "FluxSingleTransformerBlock"],
        cpu_ram_efficient_loading=False,
    )
    expected = step(fsdp2_prepare_model(engine, build(KEY)), KEY)
    for attach_first in (True, False):
        model = build(KEY)
        if attach_first:
            handle = lowtide.attach(model, interval=2)
            fsdp2_prepare_model(engine, model)
        else:
            fsdp2_prepare_model(engine, model)
            handle = lowtide.attach(model, interval=2)
        wrapped = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        assert {"", *(block.name for block in handle.receipt().blocks)} <= wrapped
        for _ in range(2):
            assert_equal(expected, step(model, KEY))
            assert_recomputed_as_scheduled(handle, interval=2)
        handle.detach()
        assert_equal(expected, step(model, KEY))


if __name__ == "__main__":
    run([prepare_with_ddp, prepare_with_bf16_autocast, fsdp2_wraps_every_block_by_its_class_name])
