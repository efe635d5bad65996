"""``backend="auto"`` when something comes between: errors, interrupts, a detach, memory that ran out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.auto import handle as handle_module
from lowtide.auto.handle import AutoHandle
from lowtide.errors import ConfigError
from lowtide.measure.probe import StepProbe
from lowtide.plan.schedule import IN_SEGMENTS, KEPT
from tests.auto.models import STEPS, attached, budget_for, dropping
from tests.runtime.toys import Chain, assert_equal, step

pytestmark = pytest.mark.usefixtures("offload", "one_round")
X = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))


def runs_as_planned(handle: AutoHandle, model: Chain) -> bool:
    """One step: whether the blocks ran as often as the plan that is attached says, and the receipt says the same."""
    for block in model.blocks:
        block.calls = 0  # type: ignore[assignment]
    step(model, lambda: model(X))
    forwards = [block.calls for block in model.blocks]
    receipt = [block.recompute_calls for block in handle.receipt().blocks]
    treatments = handle.schedule.stacks["blocks"].treatments
    return (
        forwards == [1 + (treatment in IN_SEGMENTS) for treatment in treatments]
        and receipt == [int(treatment != KEPT) for treatment in treatments]
        and bool(sum(receipt) or handle.receipt().totals["d2h_bytes"])
    )


def settles(handle: AutoHandle, model: Chain) -> bool:
    """Whether some steps on, the plan that stays is the one that runs."""
    plain = dropping()
    plain.load_state_dict(model.state_dict())
    for _ in range(STEPS + 1):
        torch.manual_seed(1)
        expected = step(plain, lambda: plain(X))
        torch.manual_seed(1)
        assert_equal(expected, step(model, lambda: model(X)))
    assert handle.plan is not None
    return handle.settled and handle.plan.schedule == handle.schedule and runs_as_planned(handle, model)


def test_after_an_error_in_attach_the_next_forward_attaches() -> None:
    model = dropping()
    with attached(model, budget_for(model, X)) as handle:
        model._gradient_checkpointing_func = None  # type: ignore[assignment]
        model.gradient_checkpointing = True  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="set to True by hand"):
            model(X)
        model.gradient_checkpointing = False  # type: ignore[assignment]
        assert runs_as_planned(handle, model)
        assert settles(handle, model)


@pytest.mark.parametrize("steps", [0, 1, 3, 6, STEPS])
@pytest.mark.parametrize("attached_first", [False, True])
def test_an_interrupt_between_two_schedules(steps: int, attached_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attach_as = handle_module.attach_as

    def interrupt(*given: Any, **more: Any) -> None:
        if attached_first:
            attach_as(*given, **more)
        raise KeyboardInterrupt

    model = dropping()
    with attached(model, budget_for(model, X)) as handle:
        for _ in range(steps):
            step(model, lambda: model(X))
        if steps == STEPS:
            handle.note_out_of_memory()  # or nothing would change any more
        with monkeypatch.context() as changed:
            changed.setattr(handle_module, "attach_as", interrupt)
            interrupted = False
            for _ in range(STEPS):
                try:
                    step(model, lambda: model(X))
                except KeyboardInterrupt:
                    interrupted = True
                    break
        assert interrupted and not handle.settled
        assert runs_as_planned(handle, model)
        assert settles(handle, model)


@pytest.mark.parametrize("place", ["start", "stop"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_where_a_probe_begins_or_ends(place: str, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dropping()
    kinds = [type(module) for module in model.modules()]
    original = getattr(StepProbe, place)

    def interrupt(probe: StepProbe) -> None:
        if done:
            original(probe)
        raise KeyboardInterrupt

    with attached(model, budget_for(model, X)) as handle:
        step(model, lambda: model(X))
        with monkeypatch.context() as changed:
            changed.setattr(StepProbe, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(model, lambda: model(X))
        assert settles(handle, model)
    assert [type(module) for module in model.modules()] == kinds


def in_the_traced_forward(do: Callable[[], None]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            do()
        return x

    return glue


def test_an_interrupt_while_a_larger_batch_is_planned_for() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model, larger = dropping(), torch.cat([X, X])
    with attached(model, budget_for(model, larger)) as handle:
        for _ in range(STEPS):
            step(model, lambda: model(X))
        model.glue = in_the_traced_forward(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(larger)
        model.glue = None
        assert not handle.settled
        for _ in range(STEPS):
            step(model, lambda: model(larger))
        assert handle.settled and handle.plan is not None and handle.plan.schedule == handle.schedule


def test_a_detach_while_it_plans_is_a_detach() -> None:
    model = dropping()
    handle = attached(model, budget_for(model, X))
    model.glue = in_the_traced_forward(handle.detach)
    step(model, lambda: model(X))
    assert not handle.active
    for block in model.blocks:
        block.calls = 0  # type: ignore[assignment]
    step(model, lambda: model(X))
    assert [block.calls for block in model.blocks] == [1] * len(model.blocks)
    assert not any("lowtide" in type(module).__call__.__module__ for module in model.modules())


def room_for_larger_steps(small_one_fails: bool) -> int:
    """What auto plans with for a batch that comes after smaller ones."""
    model, larger = dropping(), torch.cat([X] * 4)
    with attached(model, budget_for(model, larger)) as handle:
        for _ in range(3):
            step(model, lambda: model(X))
        if small_one_fails:
            handle.note_out_of_memory()
            step(model, lambda: model(X))
        for _ in range(STEPS):
            step(model, lambda: model(larger))
        assert handle.settled and handle.plan is not None
        return handle.plan.budget_bytes


def test_memory_that_ran_out_in_a_small_step_says_nothing_of_a_larger_one() -> None:
    assert room_for_larger_steps(True) == pytest.approx(room_for_larger_steps(False), rel=0.05)


def test_weights_that_are_frozen_while_it_measures_do_not_keep_it_from_settling() -> None:
    model = dropping()
    with attached(model, budget_for(model, X)) as handle:
        for number in range(STEPS + 2):
            if number == 2:
                model.blocks[0].norm.requires_grad_(False)  # type: ignore[union-attr]
            step(model, lambda: model(X))
        assert handle.settled and handle.plan is not None and handle.plan.schedule == handle.schedule


@pytest.mark.parametrize("steps", [1, 5, STEPS])
def test_after_a_step_that_ran_out_of_memory_a_plan_takes_less(steps: int) -> None:
    model = dropping()
    with attached(model, budget_for(model, X)) as handle:
        for _ in range(steps):
            step(model, lambda: model(X))
        assert handle.plan is not None
        failed = handle.plan
        handle.note_out_of_memory()
        assert not handle.settled
        assert settles(handle, model)
        assert handle.plan.prediction.peak_bytes < failed.prediction.peak_bytes
