"""What one watched step tells, and that watching changes nothing."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.handle import attach_as
from lowtide.measure.probe import StepProbe
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.resolve import resolve
from lowtide.runtime.swap import Routes
from tests.runtime.toys import Block, Chain, chain, inputs, step

CPU = torch.device("cpu")


def test_every_block_has_its_time_and_the_step_all_of_them() -> None:
    model, x = chain(5), inputs(rows=2000)
    probe = StepProbe(resolve(model, None), CPU).start()
    step(model, lambda: model(x))
    seen = probe.stop()
    assert seen is not None
    assert sorted(seen.times) == [("blocks", index) for index in range(5)]
    assert all(time.forward_ms > 0 < time.backward_ms for time in seen.times.values())
    assert seen.step_ms >= sum(time.forward_ms + time.backward_ms for time in seen.times.values())
    assert seen.peak_bytes is seen.reserved_bytes is None


def test_gradients_and_hooks_are_as_before() -> None:
    model, x = chain(4), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=2):
        probe = StepProbe(resolve(model, None), CPU).start()
        watched = step(model, lambda: model(x))
        assert probe.stop() is not None
    assert all(torch.equal(plain[name], value) for name, value in watched.items())  # type: ignore[arg-type]
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    assert {type(block) for block in model.blocks} == {Block}


def test_an_attached_and_watched_block_is_copied_as_what_it_was() -> None:
    model = chain(4)
    with lowtide.attach(model):
        probe = StepProbe(resolve(model, None), CPU).start()
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert probe.stop() is None
        assert {type(block) for each in copies for block in each.blocks} == {Block}
        with pytest.raises(ConfigError, match="attached already"):
            lowtide.attach(model)


class Compiled(nn.Module):
    """Composite, so that it is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_block_is_compiled_once_for_all_handles_and_once_for_all_probes() -> None:
    model, x = Chain([Compiled() for _ in range(4)]), inputs()
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend)  # type: ignore[operator]
    plain = step(model, lambda: model(x))
    alone = len(compiled)
    config, routes, watching = CheckpointConfig(gradient_checkpointing=False), Routes(), Routes()
    for words in (["kept"] * 4, ["whole"] * 4, ["whole", "kept"] * 2, ["kept", "whole"] * 2) * 3:
        schedule = Schedule({"blocks": mixed(words)})
        with attach_as(model, config, schedule, routes=routes) as handle:
            assert _same(plain, step(model, lambda: model(x)))
            probe = StepProbe(handle.stacks, CPU, routes=watching).start()
            assert _same(plain, step(model, lambda: model(x)))
            seen = probe.stop()
            assert handle.receipt().totals["recompute_calls"] == words.count("whole")
        assert seen is not None and len(seen.times) == 4
    assert alone < len(compiled) <= 3 * alone  # plain, attached, watched


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
