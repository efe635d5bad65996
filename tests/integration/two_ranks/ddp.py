"""DistributedDataParallel on two ranks."""

import functools
from contextlib import nullcontext
from typing import Any

import torch
from common import (
    SETTINGS,
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
from peft import LoraConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from tests.integration.models import build

MODES = ({}, {"find_unused_parameters": True}, {"static_graph": True})


def wrap(model: nn.Module, **mode: bool) -> nn.Module:
    return DistributedDataParallel(model, **mode)


@functools.cache
def plain(key: str, *mode: str) -> Gradients:
    return step(wrap(build(key), **dict.fromkeys(mode, True)), key)


def check(key: str, mode: dict[str, bool], attach_first: bool, **options: Any) -> None:
    model = build(key)
    if attach_first:
        handle = lowtide.attach(model, **options)
        model = wrap(model, **mode)
    else:
        model = wrap(model, **mode)
        handle = lowtide.attach(model, **options)
    for _ in range(2):  # a static graph is learnt in the first step
        found = step(model, key)
        assert_equal(plain(key, *mode), found)
        assert_ranks_agree(found)
        assert_recomputed_as_scheduled(handle, **options)
    handle.detach()
    assert_equal(plain(key, *mode), step(model, key))


def attached_before_or_after_wrapping() -> None:
    for mode in MODES:
        for attach_first in (True, False):
            check("flux1", mode, attach_first, interval=2)


def every_interval() -> None:
    for setting in SETTINGS:
        check("flux1", {}, True, **setting)
    check("wan21_1_3b", {}, False, backend="torch-ffn", interval=2)


def a_parameter_that_gets_no_gradient() -> None:
    """Without find_unused_parameters DDP would wait for it; with it, it must be found behind the place-holders."""

    def unused(key: str) -> nn.Module:
        model = build(key)
        model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        return model

    expected = step(wrap(unused("flux1"), find_unused_parameters=True), "flux1")
    model = unused("flux1")
    with lowtide.attach(model, interval=2) as handle:
        model = wrap(model, find_unused_parameters=True)
        for _ in range(2):
            assert_equal(expected, step(model, "flux1"))
            assert_recomputed_as_scheduled(handle, interval=2)


def accumulation_without_synchronising() -> None:
    def accumulated(model: Any) -> Gradients:
        model.zero_grad(set_to_none=True)
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                loss(model, inputs("flux1", number)).backward()
        return gradients(model)

    expected = accumulated(wrap(build("flux1")))
    model = build("flux1")
    with lowtide.attach(model, interval=2, segment_stride=4) as handle:
        model = wrap(model)
        for _ in range(2):
            found = accumulated(model)
            assert_equal(expected, found)
            assert_ranks_agree(found)
            assert_recomputed_as_scheduled(handle, interval=2, segment_stride=4)


def two_forwards_before_one_backward() -> None:
    def both(model: nn.Module) -> Gradients:
        model.zero_grad(set_to_none=True)
        (loss(model, inputs("flux1", 0)) + loss(model, inputs("flux1", 1))).backward()
        return gradients(model)

    expected = both(wrap(build("flux1")))
    model = build("flux1")
    with lowtide.attach(model, interval=2) as handle:
        found = both(wrap(model))
        receipt = handle.receipt()
    assert_equal(expected, found)
    assert_ranks_agree(found)
    assert {block.recompute_calls for block in receipt.blocks} == {2}


def lora_on_a_frozen_base() -> None:
    def with_lora() -> Any:
        model: Any = build("flux1")
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
        return model

    expected = step(wrap(with_lora()), "flux1")
    assert all("lora" in name for name in expected)
    model = with_lora()
    with lowtide.attach(model, interval=2) as handle:
        found = step(wrap(model), "flux1")
        assert_equal(expected, found)
        assert_ranks_agree(found)
        assert_recomputed_as_scheduled(handle, interval=2)


if __name__ == "__main__":
    run(
        [
            attached_before_or_after_wrapping,
            every_interval,
            a_parameter_that_gets_no_gradient,
            accumulation_without_synchronising,
            two_forwards_before_one_backward,
            lora_on_a_frozen_base,
        ]
    )
