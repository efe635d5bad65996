"""``backend="auto"`` on the CPU, where offload is simulated: budgets count against forecasts, gradients are exact."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import lowtide
from lowtide import families
from lowtide.auto.handle import AutoHandle
from lowtide.errors import ConfigError
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, fresh, loss_of, run_step
from lowtide.plan.costs import FORECAST, MEASURED
from lowtide.plan.schedule import KEPT
from tests.auto.models import STEPS, attached, budget_for, dropping, peaks
from tests.contract.conftest import EVERY_MODE
from tests.runtime.toys import Block, Chain, assert_equal, step

pytestmark = pytest.mark.usefixtures("offload", "one_round")


def ran_as_planned(handle: AutoHandle) -> bool:
    """Whether the receipt has the treatments of the schedule that is attached now, and recomputed what it says."""
    blocks = handle.receipt().blocks
    wanted = [t for stack in handle.schedule.stacks.values() for t in stack.treatments]
    return [block.treatment.partition("+")[0] for block in blocks] == wanted and all(
        (block.recompute_calls > 0) == (block.treatment.partition("+")[0] != KEPT) for block in blocks
    )


ROWS = [
    row.key
    for row in families.all_families()
    if EVERY_MODE or row.key in ("flux1", "sd3_medium", "sd15", "wan21_1_3b", "hunyuan_video_15", "stable_cascade_c")
]
"""All of them where LOWTIDE_EVERY_MODE is set: minutes."""


@pytest.mark.parametrize("key", ROWS)
def test_every_step_has_the_gradients_of_a_plain_run(key: str) -> None:
    row: Family = families.find(key)
    model = build_model(row, "tiny").train(row.train_mode)
    inputs = build_inputs(row.tiny, torch.float32)
    plain = run_step(model, inputs, seed=0)
    least, most = peaks(model, row.stacks, **inputs)
    schedules, measured_steps = [], 0
    with attached(model, least + (most - least) // 4) as handle:
        while len(schedules) < STEPS and len(schedules) < measured_steps + 3:
            assert compare(plain, run_step(model, inputs, seed=0)) == []
            schedules.append(handle.schedule)
            measured_steps += not handle.settled
            assert ran_as_planned(handle)
        assert handle.plan is not None and not handle.plan.leaves_off
        assert handle.plan.source == MEASURED
        assert handle.plan.prediction.peak_bytes <= least + (most - least) // 4
    first, sample, *again, measured = schedules[:6]
    assert again == [sample] * 3 and len({str(schedule) for schedule in (first, sample, measured, schedules[-1])}) > 1
    assert 9 <= measured_steps < STEPS - 1  # sampled, then at least one plan tried
    assert schedules[-1] == schedules[-2] in schedules[5:measured_steps]  # one of those that were tried
    assert compare(plain, run_step(model, inputs, seed=0)) == []


def test_the_plain_run_where_it_fits() -> None:
    row = families.find("flux1")
    model, inputs = build_model(row, "tiny"), build_inputs(row.tiny, torch.float32)
    with attached(model, 2**34) as handle:
        for _ in range(3):
            run_step(model, inputs, seed=0)
        assert handle.plan is not None and handle.plan.leaves_off
        assert handle.plan.source == FORECAST  # nothing had to be measured
        assert handle.receipt().totals["recompute_calls"] == handle.receipt().totals["d2h_bytes"] == 0


def test_where_nothing_fits_the_first_step_says_what_would() -> None:
    row = families.find("flux1")
    model, inputs = build_model(row, "tiny"), build_inputs(row.tiny, torch.float32)
    plain = run_step(model, inputs, seed=0)
    handle = attached(model, 2**21)
    with pytest.raises(ConfigError, match="no schedule fits in 2.00 MiB.*the smallest peak that can be reached is"):
        model(**inputs)
    with torch.no_grad():
        model(**inputs)  # no step
    with pytest.raises(ConfigError, match="no schedule fits"):
        model(**inputs)
    handle.detach()
    assert compare(plain, run_step(model, inputs, seed=0)) == []
    assert not any("lowtide" in type(module).__call__.__module__ for module in model.modules())


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="this model is on the meta device: `lowtide plan` works from shapes"):
        attached(build_model(families.find("flux1"), "tiny", device="meta"), 2**34)


def test_random_numbers_are_those_of_a_plain_run() -> None:
    model, x = dropping(), torch.randn(512, 64)
    plain = step(model, lambda: model(x))
    following, recomputed = torch.rand(3), 0
    with attached(model, budget_for(model, x)) as handle:
        for _ in range(STEPS):
            found = step(model, lambda: model(x))
            assert torch.equal(torch.rand(3), following)
            recomputed += handle.receipt().totals["recompute_calls"]
            assert_equal(plain, found)
    assert recomputed > len(model.blocks)


def test_while_nothing_is_measured_the_plan_runs() -> None:
    """What measures treatments side by side is not left to many smaller batches, and goes on with a large one."""
    model = dropping()
    small, large = torch.randn(256, 64), torch.randn(1024, 64)
    with attached(model, budget_for(model, large)) as handle:
        ran = []
        for x in (large, large, *[small] * 6, *[large] * STEPS):
            plain = copy.deepcopy(model)
            expected, found = step(plain, lambda x=x, m=plain: m(x)), step(model, lambda x=x: model(x))
            assert_equal(expected, found)
            ran.append((handle.schedule, handle.plan and handle.plan.schedule))
        assert handle.settled and handle.plan is not None and handle.plan.source == MEASURED
    (sample, first), back = ran[1], ran[8][0]
    assert sample != first == ran[0][0]
    assert [schedule for schedule, _ in ran[2:8]] == [sample] * 3 + [first] * 3
    assert back == sample == ran[9][0] == ran[10][0]


def test_a_larger_batch_is_planned_anew_and_a_smaller_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lowtide")
    model = dropping()
    small, large = torch.randn(256, 64), torch.randn(1024, 64)
    budget = budget_for(model, large)
    plans = []
    with attached(model, budget) as handle:
        for x in (small, small, large, *[small] * 2, *[large] * STEPS):
            plain = copy.deepcopy(model)
            expected, found = step(plain, lambda x=x, m=plain: m(x)), step(model, lambda x=x: model(x))
            assert_equal(expected, found)
            plans.append(handle.plan)
    assert plans[0] is not None and plans[0].leaves_off  # a quarter of the activations fits
    assert plans[2] is not None and not plans[2].leaves_off
    assert plans[2] is plans[3] is plans[4]
    assert caplog.messages.count("auto: plans anew, for a larger forward than any before") == 1
    assert plans[-1] is not None and plans[-1].source == MEASURED
    assert plans[-1].prediction.peak_bytes <= budget


def twice_before_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + model(x.sin())


def broken_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An attempt that fails half-way, then a step."""

    def fail(_: torch.Tensor) -> None:
        raise KeyError

    hook = next(iter(model.children()))[5].up.weight.register_hook(fail)  # type: ignore[index]
    with pytest.raises(KeyError):
        model(x).sum().backward()
    hook.remove()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    return model(x)


def dropped_graph(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x)
    torch.manual_seed(5)
    return model(x)


@pytest.mark.parametrize("run", [twice_before_backward, broken_backward, dropped_graph])
def test_what_is_no_ordinary_step(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    model, x = dropping(), torch.randn(512, 64)
    plain = step(model, lambda: run(model, x))
    with attached(model, budget_for(model, x)) as handle:
        recomputed = 0
        for _ in range(STEPS):
            found = step(model, lambda: run(model, x))
            assert_equal(plain, found)
            recomputed += handle.receipt().totals["recompute_calls"]
        assert handle.plan is not None and recomputed > 0


def test_twice_attached_is_an_error_and_detaching_restores_the_model() -> None:
    model = dropping()
    kinds = [type(module) for module in model.modules()]
    handle = attached(model, 2**34)
    with pytest.raises(ConfigError, match="attached already"):
        lowtide.attach(model, backend="auto", vram_budget="16GiB")
    with pytest.raises(ConfigError, match="attached already"):
        lowtide.attach(model)
    assert [type(module) for module in copy.deepcopy(model).modules()] == kinds
    handle.detach()
    assert [type(module) for module in model.modules()] == kinds
    lowtide.attach(model).detach()


@pytest.mark.parametrize("budget", [None, "auto"])
def test_without_a_device_that_says_what_is_free_a_budget_is_needed(budget: str | None) -> None:
    if torch.cuda.is_available():
        budget = "lots"
    with pytest.raises(ConfigError, match="vram_budget"):
        lowtide.attach(dropping(), backend="auto", vram_budget=budget)


def test_an_update_of_this_model_is_noticed_and_nobody_elses() -> None:
    model, other, x = dropping(), nn.Linear(4, 4), torch.randn(256, 64)
    with attached(model, 2**34) as handle:
        step(model, lambda: model(x))
        assert handle._planner is not None and handle._planner._lying is not None
        other(torch.randn(2, 4)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        assert not handle._planner._lying.updated
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert handle._planner._lying.updated


def test_an_update_before_the_first_forward_is_noticed() -> None:
    model, x = dropping(), torch.randn(256, 64)
    model(x).sum().backward()
    with attached(model, 2**34) as handle:
        torch.optim.SGD(model.parameters(), 0.1).step()
        step(model, lambda: model(x))
        assert handle._planner is not None and handle._planner._lying is not None
        assert handle._planner._lying.updated


def by_call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def by_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.forward(x)


@pytest.mark.parametrize("run", [by_call, by_forward])
def test_a_wrapper_may_call_forward(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    model, x = dropping(), torch.randn(512, 64)
    plain = step(model, lambda: model(x))
    signature = inspect.signature(model.forward)
    with attached(model, budget_for(model, x)) as handle:
        assert inspect.signature(model.forward) == signature
        for _ in range(STEPS):
            found = step(model, lambda: run(model, x))
            assert_equal(plain, found)
        assert handle.plan is not None and handle.plan.source == MEASURED and handle.settled


def test_a_lora_around_the_model() -> None:
    """PEFT calls the forward of what it wraps."""
    row = families.find("flux1")
    inner = build_model(row, "tiny")
    wrapped = get_peft_model(inner, LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    inputs = build_inputs(row.tiny, torch.float32)
    plain = run_step(wrapped, inputs, seed=0)
    least, most = peaks(inner, row.stacks, **inputs)
    with attached(wrapped, least + (most - least) // 3) as handle:
        for _ in range(STEPS):
            assert compare(plain, run_step(wrapped, inputs, seed=0)) == []
        assert handle.settled and handle.plan is not None and handle.plan.source == MEASURED


def test_blocks_that_are_called_past_the_model_are_told() -> None:
    model, x = dropping(), torch.randn(64, 64)
    with attached(model, 2**34) as handle:
        assert not any("auto plans when" in warning for warning in handle.receipt().warnings)
        y = x
        for block in model.blocks:
            y = block(y)
        y.sum().backward()
        (warning,) = handle.receipt().warnings
        assert "auto plans when Chain is called, and only its blocks have been" in warning
        step(model, lambda: model(x))
        assert handle.receipt().warnings == ()


def test_a_run_whose_gradients_add_up_is_planned_for_with_all_of_them_there(caplog: pytest.LogCaptureFixture) -> None:
    """And one whose updates clear them with the room that they leave, until they do not."""
    caplog.set_level("INFO", "lowtide")
    torch.manual_seed(0)
    model, x = Chain([Block(64) for _ in range(8)]), torch.randn(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def counts_on_their_room(handle: AutoHandle) -> bool:
        assert handle._planner is not None and handle._planner.costs is not None
        return any(handle._planner.costs.gradient_bytes.values())

    with attached(model, budget_for(model, x)) as handle:
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.settled and counts_on_their_room(handle)
        model(x).square().mean().backward()
        assert handle.settled
        once = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model(x).square().mean().backward()  # adds to them
        assert not handle.settled and not counts_on_their_room(handle)
        assert [line for line in caplog.messages if "anew" in line] == ["auto: plans anew, since gradients add up"]
        for weight, first in zip(model.parameters(), once, strict=True):
            assert weight.grad is not None and torch.equal(weight.grad, first + first)
        for _ in range(STEPS):
            model(x).square().mean().backward()
        assert handle.settled and not counts_on_their_room(handle)


@pytest.mark.parametrize("key", ["flux1", "sd3_medium"])
@pytest.mark.parametrize("together", [True, False])
def test_several_forwards_before_a_backward(key: str, together: bool) -> None:
    """The schedule changes while the graph of the first forward is alive, and is replayed under the next one."""
    row = families.find(key)
    model = build_model(row, "tiny").train(row.train_mode)
    inputs = build_inputs(row.tiny, torch.float32)

    def gradients() -> list[torch.Tensor | None]:
        model.zero_grad()
        losses = [loss_of(model(**fresh(inputs))) * factor for factor in (1.0, -0.25)]
        for loss in [losses[0] + losses[1]] if together else losses:
            loss.backward()
        return [weight.grad for weight in model.parameters()]

    plain = gradients()
    least, most = peaks(model, row.stacks, **inputs)
    schedules = set()
    for share in (0.05, 0.6):
        with attached(model, int(least + share * (most - least))) as handle:
            for _ in range(STEPS // 2 + 1):
                for found, expected in zip(gradients(), plain, strict=True):
                    assert (found is None) == (expected is None)
                    assert found is None or expected is None or torch.equal(found, expected)
                schedules.add(str(handle.schedule))
    assert len(schedules) > 3
