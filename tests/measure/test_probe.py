"""What one watched step tells, and that watching changes nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.handle import attach_as
from lowtide.measure.probe import StepProbe
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.in_turn import InTurn
from lowtide.runtime.resolve import resolve
from lowtide.runtime.swap import Routes
from lowtide.testing import cpu_offload
from tests.measure.metering import CountingMeter
from tests.runtime.links import LateLink, use_link
from tests.runtime.toys import Block, Chain, Residual, assert_equal, chain, compile_each, inputs, step

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


class Sine(nn.Module):
    """Saves neither what it is given nor what it returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width).requires_grad_(False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(self.first(x)))


def test_what_only_the_caller_still_holds_when_a_block_ends_is_not_kept_by_it() -> None:
    model, x = Chain([Sine(16) for _ in range(4)]), inputs(rows=64).requires_grad_()
    with CountingMeter() as meter:
        probe = StepProbe(resolve(model, None), CPU, meter, each=True).start()
        model(x).sum().backward()
        seen = probe.stop()
    assert seen is not None
    assert [seen.memory["blocks", index].kept_bytes // x.nbytes for index in range(4)] == [2, 1, 1, 2]


@cpu_offload()
def test_what_is_on_its_way_is_kept_by_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    use_link(monkeypatch, LateLink())
    model, x = chain(8), inputs(rows=64)
    config = CheckpointConfig(gradient_checkpointing=False, offload_min_bytes=1)

    def kept_bytes(words: list[str], count_passing: bool) -> list[int]:
        with attach_as(model, config, Schedule({"blocks": mixed(words)})) as handle:
            step(model, lambda: model(x))  # the first one under a schedule counts bytes
            passing = handle.passing_bytes if count_passing else lambda: 0
            with CountingMeter() as meter:
                probe = StepProbe(handle.stacks, CPU, meter, each=True, passing=passing).start()
                step(model, lambda: model(x))
                seen = probe.stop()
        assert seen is not None
        return [seen.memory["blocks", index].kept_bytes for index in range(8) if words[index] == "kept"]

    plain = kept_bytes(["whole", "kept"] * 4, True)
    assert len(set(plain)) == 1
    assert kept_bytes(["whole+boundary", "kept"] * 4, True) == plain
    assert min(kept_bytes(["whole+boundary", "kept"] * 4, False)) < plain[0]


def test_gradients_and_hooks_are_as_before() -> None:
    model, x = chain(4), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=2):
        probe = StepProbe(resolve(model, None), CPU).start()
        watched = step(model, lambda: model(x))
        assert probe.stop() is not None
    assert_equal(plain, watched)
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


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_block_is_compiled_once_for_all_handles_and_once_for_all_probes() -> None:
    model, x = Chain([Residual(16) for _ in range(4)]), inputs()
    compiled = compile_each(model)
    plain = step(model, lambda: model(x))
    alone = len(compiled)
    config, in_turn, watching = CheckpointConfig(gradient_checkpointing=False), InTurn(1), Routes()
    for words in (["kept"] * 4, ["whole"] * 4, ["whole", "kept"] * 2, ["kept", "whole"] * 2) * 3:
        schedule = Schedule({"blocks": mixed(words)})
        with attach_as(model, config, schedule, in_turn=in_turn) as handle:
            assert_equal(plain, step(model, lambda: model(x)))
            probe = StepProbe(handle.stacks, CPU, routes=watching).start()
            assert_equal(plain, step(model, lambda: model(x)))
            seen = probe.stop()
            assert handle.receipt().totals["recompute_calls"] == words.count("whole")
        assert seen is not None and len(seen.times) == 4
    assert alone < len(compiled) <= 3 * alone  # plain, attached, watched
