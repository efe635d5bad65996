"""What one watched step tells, and that watching changes nothing."""

import torch

import lowtide
from lowtide.measure.probe import StepProbe
from lowtide.runtime.resolve import resolve
from tests.runtime.toys import chain, inputs, step

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


def test_recomputation_counts_to_backward() -> None:
    model, x = chain(4), inputs()
    with lowtide.attach(model):
        probe = StepProbe(resolve(model, None), CPU).start()
        step(model, lambda: model(x))
        seen = probe.stop()
    assert seen is not None and len(seen.times) == 4
    assert [block.calls for block in model.blocks] == [2] * 4  # type: ignore[union-attr]


def test_a_step_that_did_not_end_tells_nothing() -> None:
    model, x = chain(4), inputs()
    probe = StepProbe(resolve(model, None), CPU).start()
    model(x)
    assert probe.stop() is None
    probe = StepProbe(resolve(model, None), CPU).start()
    with torch.no_grad():
        model(x)
    assert probe.stop() is None
