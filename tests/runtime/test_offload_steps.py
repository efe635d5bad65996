"""What offload must survive, with copies that run as late as they may: many steps, whose memory does not grow
and whose copies come in time."""

import gc
import weakref
from typing import Any

import pytest
import torch

from lowtide.plan.schedule import Schedule, mixed
from tests.runtime.links import LateLink
from tests.runtime.offload_settings import ALL, attached, settings, transformers
from tests.runtime.toys import Block, Chain, inputs, step

pytestmark = pytest.mark.usefixtures("on_the_cpu", "no_violations")


@settings({name: ALL[name] for name in ("unsloth in twos", "attention and ffn", "each its own")})
def test_a_hundred_steps_need_the_buffers_of_two(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs(8)
    with attached(model, **setting) as handle:
        seen = []
        for _ in range(100):
            step(model, lambda: model(x))
            assert handle._store is not None
            seen.append(handle._store.pool.total_bytes)
        assert len(set(seen[1:])) == 1
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@settings({name: ALL[name] for name in ("unsloth", "attention and ffn", "each its own")})
def test_no_tensor_is_kept_over_steps_evaluations_and_new_shapes(setting: dict[str, Any], late: LateLink) -> None:
    model = transformers(dropout=0.1)
    with attached(model, **setting) as handle:
        step(model, lambda: model(inputs()))
        model.zero_grad(set_to_none=True)
        handle._store.pool.trim()  # type: ignore[union-attr]
        gc.collect()
        before = _count_tensors()
        gc.disable()
        try:
            for number in range(40):
                step(model, lambda rows=1 + number % 7: model(inputs(rows)))
                if number % 10 == 0:
                    with torch.no_grad():
                        model(inputs())
                    model(inputs())  # a graph that is dropped
            model.zero_grad(set_to_none=True)
            handle._store.pool.trim()  # type: ignore[union-attr]
            late.finish()
            after = _count_tensors()
        finally:
            gc.enable()
        assert after <= before


def _count_tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("bounded", [False, True])
def test_prefetch_misses_are_few_at_depth_eight(bounded: bool) -> None:
    model, x = transformers(8), inputs(64)
    schedule = Schedule({"blocks": mixed(["whole+boundary"] * 8)}, in_flight_bytes=0, prefetch_bytes=2 * x.nbytes)
    options = {"backend": None, "schedule": schedule} if bounded else {"backend": "unsloth"}
    with attached(model, **options) as handle:
        for _ in range(4):
            step(model, lambda: model(x))
            copies = handle.receipt().copies
            assert copies.d2h_bytes == 7 * x.nbytes
            assert copies.prefetch_misses <= 1
            assert copies.h2d_bytes <= copies.d2h_bytes


@settings({name: ALL[name] for name in ("unsloth", "attention and ffn", "each its own")})
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prefetch_misses_are_few_with_two_graphs_in_flight(setting: dict[str, Any], order: tuple[int, int]) -> None:
    model, x = transformers(dropout=0.0), inputs(64)
    with attached(model, **setting) as handle:
        for _ in range(3):
            losses = [model(x).sum(), model(x * 2).sum()]
            for index in order:
                losses[index].backward()
            copies = handle.receipt().copies
            assert copies.prefetch_misses <= 4  # where a graph begins, not wherever it is read
            assert copies.h2d_bytes <= copies.d2h_bytes


def test_boundaries_held_on_the_device_are_within_the_bound() -> None:
    """After each block of the forward, of the boundaries before it at most the bound is still there."""
    held: list[int] = []
    alive: list[weakref.ref[Any]] = []

    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        held.append(sum(storage() is not None for storage in alive))
        x = x * 1
        alive.append(weakref.ref(x.untyped_storage()))
        return x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(10)], glue), inputs()
    schedule = Schedule({"blocks": mixed(["whole+boundary"] * 10)}, in_flight_bytes=2 * x.nbytes)
    with attached(model, backend=None, schedule=schedule):
        for _ in range(2):
            held.clear()
            alive.clear()
            output = model(x)
            assert max(held) <= 3  # two that wait, and the block's own argument
            assert held[-1] >= 1
            output.sum().backward()
