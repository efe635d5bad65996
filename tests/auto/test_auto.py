"""``backend="auto"`` on the CPU, where offload is simulated: budgets count against forecasts, gradients are exact."""

import copy
import gc
import inspect
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import lowtide
from lowtide import families
from lowtide.auto.handle import AutoHandle
from lowtide.auto.planner import Planner
from lowtide.errors import ConfigError
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, run_step
from lowtide.plan.costs import FORECAST, MEASURED
from lowtide.plan.schedule import KEPT
from lowtide.plan.solve import smallest_peak, solve
from lowtide.testing import cpu_offload
from tests.runtime.toys import Block, Chain, step

STEPS = 14
"""More than ``auto`` measures."""


@pytest.fixture(autouse=True)
def _offload() -> Iterator[None]:
    with cpu_offload():
        yield


def peaks(model: nn.Module, stacks: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """The least that a schedule reaches, and what the plain run takes, by forecast."""
    planner = Planner(model, stacks, torch.device("cpu"), 2**40, 1, can_move=True)
    planner.forecast(args, kwargs)
    assert planner.costs is not None
    return smallest_peak(planner.costs).peak_bytes, solve(planner.costs, 2**40).prediction.peak_bytes


def attached(model: nn.Module, budget_bytes: int) -> AutoHandle:
    handle = lowtide.attach(model, backend="auto", vram_budget=budget_bytes, offload_min_bytes=1)
    assert isinstance(handle, AutoHandle)
    return handle


def ran_as_planned(handle: AutoHandle) -> bool:
    """Whether the receipt has the treatments of the schedule that is attached now, and recomputed what it says."""
    blocks = handle.receipt().blocks
    wanted = [t for stack in handle.schedule.stacks.values() for t in stack.treatments]
    return [block.treatment.partition("+")[0] for block in blocks] == wanted and all(
        (block.recompute_calls > 0) == (block.treatment.partition("+")[0] != KEPT) for block in blocks
    )


@pytest.mark.parametrize("key", ["flux1", "sd3_medium", "sdxl", "wan21_1_3b", "hunyuan_video_15", "stable_cascade_c"])
def test_every_step_has_the_gradients_of_a_plain_run(key: str) -> None:
    row: Family = families.find(key)
    model = build_model(row, "tiny").train(row.train_mode)
    inputs = build_inputs(row.tiny, torch.float32)
    plain = run_step(model, inputs, seed=0)
    least, most = peaks(model, row.stacks, **inputs)
    schedules = []
    with attached(model, least + (most - least) // 4) as handle:
        for _ in range(STEPS):
            assert compare(plain, run_step(model, inputs, seed=0)) == []
            schedules.append(handle.schedule)
            assert ran_as_planned(handle)
        assert handle.plan is not None and not handle.plan.leaves_off
        assert handle.plan.source == MEASURED
        assert handle.plan.prediction.peak_bytes <= least + (most - least) // 4
    first, sample, again, measured = schedules[:4]
    assert first != sample == again != measured
    assert schedules[-1] == schedules[-2] in schedules[3:12]  # one of those that were tried
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


def dropping(depth: int = 12) -> Chain:
    torch.manual_seed(0)
    return Chain([Block(64, dropout=0.3) for _ in range(depth)])


def budget_for(model: nn.Module, x: torch.Tensor) -> int:
    least, most = peaks(model, None, x)
    return least + (most - least) // 3


def test_random_numbers_are_those_of_a_plain_run() -> None:
    model, x = dropping(), torch.randn(512, 64)
    plain = step(model, lambda: model(x))
    following, recomputed = torch.rand(3), 0
    with attached(model, budget_for(model, x)) as handle:
        for _ in range(STEPS):
            found = step(model, lambda: model(x))
            assert torch.equal(torch.rand(3), following)
            recomputed += handle.receipt().totals["recompute_calls"]
            assert all(torch.equal(plain[name], value) for name, value in found.items())  # type: ignore[arg-type]
    assert recomputed > len(model.blocks)


def test_a_larger_batch_is_planned_anew_and_a_smaller_one_is_not() -> None:
    model = dropping()
    small, large = torch.randn(256, 64), torch.randn(1024, 64)
    budget = budget_for(model, large)
    plans = []
    with attached(model, budget) as handle:
        for x in (small, small, large, *[small] * 2, *[large] * STEPS):
            plain = copy.deepcopy(model)
            expected, found = step(plain, lambda x=x, m=plain: m(x)), step(model, lambda x=x: model(x))
            assert all(torch.equal(expected[name], value) for name, value in found.items())  # type: ignore[arg-type]
            plans.append(handle.plan)
    assert plans[0] is not None and plans[0].leaves_off  # a quarter of the activations fits
    assert plans[2] is not None and not plans[2].leaves_off
    assert plans[2] is plans[3] is plans[4]
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
            assert all(torch.equal(plain[name], value) for name, value in found.items())  # type: ignore[arg-type]
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
            assert all(torch.equal(plain[name], value) for name, value in found.items())  # type: ignore[arg-type]
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


# ------------------------------------------------------------------ what planning must leave alone


class Drawing(Chain):
    """Skips blocks and scales by numbers that are not torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.7:
                x = block(x) * np.random.rand()
        return x


def test_planning_draws_no_random_numbers_of_python_or_numpy() -> None:
    def run() -> list[Any]:
        random.seed(0)
        np.random.seed(0)
        return [step(model, lambda: model(x)) for _ in range(STEPS)]

    torch.manual_seed(0)
    model, x = Drawing([Block(64) for _ in range(12)]), torch.randn(256, 64)
    plain = run()
    with attached(model, 2**34):
        ours = run()
    for expected, found in zip(plain, ours, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert (value is None and found[name] is None) or torch.equal(value, found[name]), name


def test_planning_calls_no_hooks() -> None:
    model, x = dropping(), torch.randn(256, 64)
    seen: list[torch.Tensor] = []
    hook = model.blocks[3].register_forward_hook(lambda module, args, output: seen.append(output))
    with attached(model, 2**34):
        step(model, lambda: model(x))
    assert len(seen) == 1 and not seen[0].is_meta
    hook.remove()


class Cache:
    def __init__(self) -> None:
        self.items: list[int] = []


class Taking(Chain):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize("argument", [Cache(), iter([1, 2])], ids=lambda a: type(a).__name__)
def test_an_argument_that_a_trace_might_change_is_refused(argument: Any) -> None:
    model, x = Taking([Block(64) for _ in range(4)]), torch.randn(8, 64)
    with attached(model, 2**34):
        for _ in range(2):
            with pytest.raises(ConfigError, match="which tracing it might change. Choose a backend by name instead"):
                model(x, argument)


def test_a_model_whose_inputs_alone_get_gradients_is_within_its_budget() -> None:
    model = dropping(24).requires_grad_(False)
    x = torch.randn(1024, 64, requires_grad=True)
    least, most = peaks(model, None, x)
    with attached(model, least + (most - least) // 4) as handle:
        model(x).sum().backward()
        assert handle.plan is not None and not handle.plan.leaves_off
    assert most - least > 24 * 1024 * 64 * 4


def test_several_handles_and_hooks_of_others_go_with_one_optimizer() -> None:
    first, second, x = dropping(), dropping(), torch.randn(256, 64)
    updates = []
    hook = register_optimizer_step_post_hook(lambda *_: updates.append(1))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-3)
    with attached(first, 2**34), attached(second, 2**34):
        for _ in range(3):
            (first(x).sum() + second(x).sum()).backward()
            optimizer.step()
    hook.remove()
    assert len(updates) == 3
    assert len(_global_optimizer_post_hooks) == 0


def test_a_model_that_nobody_wants_any_more_goes() -> None:
    model, x = dropping(), torch.randn(64, 64)
    handle = attached(model, 2**34)
    model(x).sum().backward()
    alive = weakref.ref(model)
    del model, handle
    gc.collect()
    assert alive() is None


def test_more_weights_that_are_trained_are_planned_for() -> None:
    model, x = dropping().requires_grad_(False), torch.randn(512, 64)
    model.blocks[0].requires_grad_(True)  # type: ignore[operator]
    with attached(model, budget_for(dropping(), x)) as handle:
        step(model, lambda: model(x))
        first = handle.plan
        model.requires_grad_(True)
        step(model, lambda: model(x))
        assert handle.plan is not first
        model.requires_grad_(False)
        model.blocks[0].requires_grad_(True)  # type: ignore[operator]
        second = handle.plan
        step(model, lambda: model(x))
        assert handle.plan is second  # what is enough for more is enough for less


def test_a_model_that_has_grown_is_planned_anew() -> None:
    model, x = dropping(), torch.randn(512, 64)
    with attached(model, budget_for(model, x)) as handle:
        step(model, lambda: model(x))
        model.blocks.append(Block(64))
        plain = copy.deepcopy(model)
        expected = step(plain, lambda: plain(x))
        for _ in range(3):
            found = step(model, lambda: model(x))
            assert all(torch.equal(expected[name], value) for name, value in found.items())  # type: ignore[arg-type]
        assert {name: stack.depth for name, stack in handle.schedule.stacks.items()} == {"blocks": 13}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def with_lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(target_modules=["up"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [compiled, with_lora])
def test_a_wrapper_of_a_model_of_no_family(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped, x = wrap(dropping()), torch.randn(64, 64)
    with attached(wrapped, 2**34) as handle:
        wrapped(x).sum().backward()
        assert handle.plan is not None and type(handle.stacks[0].blocks[0][1]).__name__ == "Block"


def test_transforms_pass_through_untreated() -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(64) for _ in range(4)]), torch.randn(8, 64)
    weights = dict(model.named_parameters())

    def loss(weights: Any) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    plain = torch.func.grad(loss)(weights)
    with attached(model, 2**34):
        found = torch.func.grad(loss)(weights)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_a_block_that_gives_a_parameter_keeps_no_hooks_of_ours() -> None:
    class Giving(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.up.weight

    class Taken(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x, weight = block(x)
                x = x + weight.sum() * 1e-3
            return x

    model, x = Taken([Giving(64) for _ in range(6)]), torch.randn(256, 64)
    plain = step(model, lambda: model(x))
    with attached(model, 2**34):
        for _ in range(3):
            assert all(torch.equal(plain[n], v) for n, v in step(model, lambda: model(x)).items())  # type: ignore[arg-type]
    assert not any(weight._backward_hooks for weight in model.parameters())


def test_a_forward_that_was_exchanged_for_another_is_told() -> None:
    model, x = dropping(), torch.randn(64, 64)
    with attached(model, 2**34):
        original = model.forward
        model.forward = lambda x: original(x) * 1.0  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="auto cannot plan for this model"):
            model(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_stay_compiled_whatever_is_tried() -> None:
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model, x = Chain([Plain() for _ in range(12)]), torch.randn(512, 64)
    budget = budget_for(model, x)
    for block in model.blocks:
        block.compile(backend=backend)  # type: ignore[operator]
    plain = step(model, lambda: model(x))
    alone = len(graphs)
    schedules = []
    with attached(model, budget) as handle:
        for _ in range(STEPS):
            found = step(model, lambda: model(x))
            assert all(torch.equal(plain[name], value) for name, value in found.items())  # type: ignore[arg-type]
            schedules.append(handle.schedule)
        assert handle.settled and handle.plan is not None and handle.plan.source == MEASURED
    assert len(set(map(str, schedules))) >= 3
    assert len(graphs) <= 3 * alone  # without lowtide, attached, watched
    assert {t for schedule in schedules for t in schedule.stacks["blocks"].treatments} == {"kept", "whole"}
