"""accelerate's ``Accelerator.prepare`` on two ranks: DDP, and FSDP2 that wraps blocks by the name of their class."""

import functools
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from common import Gradients, assert_equal, assert_ranks_agree, assert_recomputed_as_scheduled, build, gradients, inputs, loss, run
from torch import nn
from torch.distributed.fsdp import FSDPModule

import lowtide

KEY = "flux1"
FLUX_BLOCKS = ["FluxTransformerBlock", "FluxSingleTransformerBlock"]


def accelerator(fsdp: bool) -> Accelerator:
    Accelerator._shared_state if False else None
    if not fsdp:
        return Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=FLUX_BLOCKS,
        reshard_after_forward=True,
    )
    return Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)

def f():
    acc = accelerator(False)
    print(acc.state)
    m = build(KEY)
    m = acc.prepare(m)
    print(type(m))
def g():
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(False)
    acc = accelerator(True)
    print(acc.state)
    m = build(KEY)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    m, opt = acc.prepare(m, opt)
    print(type(m), sum(isinstance(x, FSDPModule) for x in m.modules()))
if __name__ == "__main__":
    run([f,g])
