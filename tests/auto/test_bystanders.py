"""What ``auto`` must leave alone: random numbers, hooks, arguments, other handles, memory, compiled code, wrappers."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import lowtide
from lowtide.errors import ConfigError
from lowtide.plan.costs import MEASURED
from tests.auto.models import STEPS, attached, budget_for, dropping, peaks
from tests.runtime.toys import Block, Chain, Residual, assert_equal, compile_each, step

pytestmark = pytest.mark.usefixtures("offload", "one_round")


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
        assert_equal(expected, found)


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


@pytest.mark.parametrize("after", [1, 4, 8, STEPS])
@pytest.mark.parametrize("change", ["goes", "comes"])
def test_blocks_that_come_or_go_are_planned_for(change: str, after: int) -> None:
    model, x = dropping(), torch.randn(64, 64)
    with attached(model, budget_for(model, x)) as handle:
        for number in range(after + 2):
            if number == after and change == "goes":
                del model.blocks[-1]
            elif number == after:
                model.blocks.append(Block(64).requires_grad_(False))
            step(model, lambda: model(x))
        assert handle.schedule.stacks["blocks"].depth == len(model.blocks)
        assert len(handle.receipt().blocks) == len(model.blocks)


def test_a_block_of_a_model_that_is_attached_is_refused_and_left_as_it_was() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([dropping(), dropping()])})
    parts = [part for block in model["blocks"] for part in block.modules()]
    handle = lowtide.attach(model, backend="torch")
    kinds, hooks = [type(part) for part in parts], len(_global_optimizer_post_hooks)
    with pytest.raises(ConfigError, match="attached already"):
        lowtide.attach(model["blocks"][0], backend="auto", vram_budget=2**30)
    assert [type(part) for part in parts] == kinds and len(_global_optimizer_post_hooks) == hooks
    handle.detach()
    lowtide.attach(model["blocks"][0], backend="auto", vram_budget=2**30).detach()


def test_a_model_that_has_grown_is_planned_anew() -> None:
    model, x = dropping(), torch.randn(512, 64)
    with attached(model, budget_for(model, x)) as handle:
        step(model, lambda: model(x))
        model.blocks.append(Block(64))
        plain = copy.deepcopy(model)
        expected = step(plain, lambda: plain(x))
        for _ in range(3):
            found = step(model, lambda: model(x))
            assert_equal(expected, found)
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
    assert_equal(plain, found)


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
            assert_equal(plain, step(model, lambda: model(x)))
    assert not any(weight._backward_hooks for weight in model.parameters())


def test_a_forward_that_was_exchanged_for_another_is_told() -> None:
    model, x = dropping(), torch.randn(64, 64)
    with attached(model, 2**34):
        original = model.forward
        model.forward = lambda x: original(x) * 1.0  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="auto cannot plan for this model"):
            model(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_stay_compiled_whatever_is_tried() -> None:
    torch.manual_seed(0)
    model, x = Chain([Residual(64) for _ in range(12)]), torch.randn(512, 64)
    budget = budget_for(model, x)
    graphs = compile_each(model)
    plain = step(model, lambda: model(x))
    alone = len(graphs)
    schedules = []
    with attached(model, budget) as handle:
        for _ in range(STEPS):
            found = step(model, lambda: model(x))
            assert_equal(plain, found)
            schedules.append(handle.schedule)
        assert handle.settled and handle.plan is not None and handle.plan.source == MEASURED
    assert len(set(map(str, schedules))) >= 3
    assert len(graphs) <= 3 * alone  # without lowtide, attached, watched
    assert {t for schedule in schedules for t in schedule.stacks["blocks"].treatments} == {"kept", "whole"}
