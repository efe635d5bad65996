"""``lowtide.offload_activations`` and ``lowtide.checkpoint(backend="unsloth")``: offload without attach."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide import testing
from lowtide.errors import ConfigError, ReplayError
from tests.runtime.links import LateLink, use_link
from tests.runtime.toys import assert_equal, chain, inputs, step

SMALL = {"offload_min_bytes": 1}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with testing.cpu_offload():
        yield


def regions(model: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    for block in model.blocks:  # type: ignore[union-attr]
        x = lowtide.checkpoint(block, x, **options)
    return x


def outside(function: Callable[[], None]) -> None:
    """Run where offload is not simulated; raises what ``function`` raises."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  raised again below
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


# ---------------------------------------------------------------------- offload_activations


@pytest.mark.parametrize("with_model", [True, False])
def test_gradients_and_copies(with_model: bool) -> None:
    model, x = chain(dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    offload = lowtide.offload_activations(model if with_model else None, **SMALL)

    def run() -> torch.Tensor:
        with offload:
            return model(x)

    for _ in range(3):
        assert_equal(plain, step(model, run))
        copies = offload.copies()
        assert copies.d2h_bytes == copies.h2d_bytes > 0
        assert copies.pool["in_use_bytes"] == 0
    assert copies.exposed_copy_ms > 0  # the host's copies hide behind nothing


def test_what_moves_is_what_a_plain_run_saves_without_the_weights() -> None:
    model, x = chain(), inputs()
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    expected = sum(storage.nbytes() for key, storage in storages.items() if key not in weights)
    offload = lowtide.offload_activations(model, **SMALL)
    with offload:
        output = model(x)
    assert offload.copies().d2h_bytes == expected
    output.sum().backward()


def test_small_tensors_stay() -> None:
    model, x = chain(), inputs()
    offload = lowtide.offload_activations(model, offload_min_bytes=6 * 64 * 4)  # the wide ones only
    with offload:
        output = model(x)
    assert offload.copies().d2h_bytes == 2 * 4 * 6 * 64 * 4
    output.sum().backward()
    default = lowtide.offload_activations(model)
    with default:
        output = model(x)
    output.sum().backward()
    assert default.copies().d2h_bytes == 0


def test_buffers_are_used_again_at_every_step_and_by_the_next_call() -> None:
    model, x = chain(), inputs(256)
    seen = set()
    for _ in range(20):
        offload = lowtide.offload_activations(model, **SMALL)
        for _ in range(2):
            with offload:
                output = model(x)
            output.sum().backward()
            del output
            pool = offload.copies().pool
            seen.add((pool["buffers"], pool["pageable_bytes"]))
    assert len(seen) == 1
    another = lowtide.offload_activations(model, offload_min_bytes=2)
    assert another.copies().pool["buffers"] == 0  # other settings, other buffers


def test_release_pool_frees_what_no_graph_uses() -> None:
    gc.collect()
    model, x = chain(), inputs()
    with lowtide.offload_activations(model, **SMALL):
        output = model(x)
    testing.release_pool()
    used = testing.pool_bytes()
    assert used > 0
    output.sum().backward()
    del output
    testing.release_pool()
    assert testing.pool_bytes() == 0


def test_store_and_buffers_go_with_the_model() -> None:
    gc.collect()
    testing.release_pool()
    others = testing.pool_bytes()
    model, x = chain(), inputs()
    with lowtide.offload_activations(model, **SMALL):
        output = model(x)
    assert testing.pool_bytes() > others
    del model, output
    gc.collect()
    assert testing.pool_bytes() == others


def test_exception_inside() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    offload = lowtide.offload_activations(model, **SMALL)
    for _ in range(2):
        with pytest.raises(ArithmeticError), offload:
            model(x)
            raise ArithmeticError
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # type: ignore[attr-defined]
        gc.collect()
        assert offload.copies().pool["in_use_bytes"] == 0

    def run() -> torch.Tensor:
        with offload:
            return model(x)

    assert_equal(plain, step(model, run))


def test_entered_twice_at_once() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    offload = lowtide.offload_activations(model, **SMALL)

    def run() -> torch.Tensor:
        with offload:
            hidden = model.blocks[0](x)
            with offload:
                hidden = model.blocks[1](hidden)
            return model.blocks[3](model.blocks[2](hidden))

    for _ in range(2):
        assert_equal(plain, step(model, run))
    assert offload.copies().pool["in_use_bytes"] == 0


def test_two_regions_before_one_backward_and_a_backward_between() -> None:
    model, x = chain(), inputs()
    offload = lowtide.offload_activations(model, **SMALL)

    def run(around: Any) -> list[torch.Tensor]:
        found = []
        with around:
            first = model(x).sum()
        with around:
            second = model(x * 2).sum()
        found += torch.autograd.grad(first, list(model.parameters()))
        with around:
            third = model(x * 3).sum()
        found += torch.autograd.grad(third, list(model.parameters()))
        found += torch.autograd.grad(second, list(model.parameters()))
        return found

    plain = run(nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(plain, run(offload), strict=True))
    assert offload.copies().pool["in_use_bytes"] == 0


def test_nothing_is_moved_without_gradients() -> None:
    model, x = chain(), inputs()
    offload = lowtide.offload_activations(model, **SMALL)
    with torch.no_grad(), offload:
        model(x)
    with torch.inference_mode(), offload:
        model(x)
    assert offload.copies().d2h_bytes == 0


def test_saved_tensor_changed_in_place_inside_is_an_error() -> None:
    x = torch.randn(64, requires_grad=True) * 1
    with lowtide.offload_activations(**SMALL):
        loss = x.sin().sum()
        x.mul_(2)
    with pytest.raises(ReplayError, match="modified by an inplace"):
        loss.backward()


# ---------------------------------------------------------------------- with checkpoints and handles


@pytest.mark.parametrize("backend", ["torch", "unsloth"])
@pytest.mark.parametrize("with_model", [True, False])
def test_checkpoints_inside(backend: str, with_model: bool) -> None:
    model, x = chain(dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    for block in model.blocks:
        block.calls = 0
    offload = lowtide.offload_activations(model if with_model else None, **SMALL)

    def run() -> torch.Tensor:
        with offload:
            return regions(model, x, backend=backend, **SMALL)

    for _ in range(2):
        assert_equal(plain, step(model, run))
        assert offload.copies().pool["in_use_bytes"] == 0
    assert [block.calls for block in model.blocks] == [4] * 4
    if backend == "torch":
        assert offload.copies().d2h_bytes == 4 * x.nbytes  # each checkpoint's argument, which hooks outside see


def test_a_region_inside_a_checkpoint() -> None:
    model, x = chain(dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    offload = lowtide.offload_activations(model, **SMALL)

    def part(value: torch.Tensor) -> torch.Tensor:
        with offload:
            value = model.blocks[1](model.blocks[0](value))
        return model.blocks[3](model.blocks[2](value))

    for backend in ("torch", "unsloth"):
        for _ in range(2):
            found = step(model, lambda backend=backend: lowtide.checkpoint(part, x, backend=backend, **SMALL))
            assert_equal(plain, found)
            gc.collect()
            assert offload.copies().pool["in_use_bytes"] == 0


def test_an_attached_model_inside() -> None:
    model, x = chain(dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    offload = lowtide.offload_activations(model, **SMALL)

    def run() -> torch.Tensor:
        with offload:
            return model(x)

    for options in ({}, {"interval": 2}, {"backend": "unsloth", "offload_min_bytes": 1}):
        with lowtide.attach(model, **options) as handle:  # type: ignore[arg-type]
            for _ in range(2):
                assert_equal(plain, step(model, run))
            assert handle.receipt().totals["recompute_calls"] == 4
        assert offload.copies().pool["in_use_bytes"] == 0


# ---------------------------------------------------------------------- checkpoints with offload


def test_checkpoints_with_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    link = LateLink()
    use_link(monkeypatch, link)
    options = {"backend": "unsloth", "offload_min_bytes": 3}  # a store of its own, so that it takes this link
    model, x = chain(5, dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    for _ in range(3):
        link.log.clear()
        assert_equal(plain, step(model, lambda: regions(model, x, **options)))
        assert sum(sum(sizes) for name, sizes in link.log if name == "copy_out") == 5 * x.nbytes
    link.finish()
    assert link.violations == []


def test_keywords_closures_and_views_wait_too() -> None:
    model, x = chain(3), inputs()
    fused = torch.randn(6, 48)
    first, second, third = fused.chunk(3, dim=-1)

    def region(value: torch.Tensor, *, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return model.blocks[0](value * more["first"] + second) * third.sin()

    def run(checkpoint: Callable[..., Any]) -> torch.Tensor:
        return checkpoint(region, x, more={"first": first})

    plain = step(model, lambda: run(lambda function, *args, **kwargs: function(*args, **kwargs)))
    offloaded = step(model, lambda: run(lambda f, *a, **k: lowtide.checkpoint(f, *a, backend="unsloth", **SMALL, **k)))
    assert_equal(plain, offloaded)


def test_argument_that_wants_a_gradient() -> None:
    model, x = chain(3), inputs().requires_grad_()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(regions(model, x, backend="unsloth", **SMALL).sum(), x)
    assert torch.equal(plain, found)


def test_nested_checkpoints_with_offload() -> None:
    model, x = chain(4, dropout=0.2), inputs()
    plain = step(model, lambda: model(x))
    options: dict[str, Any] = {"backend": "unsloth", **SMALL}

    def half(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(value: torch.Tensor) -> torch.Tensor:
            for block in model.blocks[start : start + 2]:
                value = lowtide.checkpoint(block, value, **options)
            return value

        return run

    def nested() -> torch.Tensor:
        return lowtide.checkpoint(half(2), lowtide.checkpoint(half(0), x, **options), **options)

    for _ in range(2):
        assert_equal(plain, step(model, nested))


def test_exception_in_a_checkpoint_leaves_nothing() -> None:
    testing.release_pool()
    in_use = testing.pool_bytes()
    x = torch.randn(4096, requires_grad=True)

    def fails(value: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        lowtide.checkpoint(fails, x * 2, backend="unsloth", **SMALL)
    gc.collect()
    testing.release_pool()
    assert testing.pool_bytes() == in_use


def test_changed_argument_is_an_error_or_does_no_harm() -> None:
    """Its copy was made at the call, so a later change cannot be in it."""
    model, x = chain(2), inputs()
    plain = step(model, lambda: model(x))

    def run() -> torch.Tensor:
        value = x * 1
        output = lowtide.checkpoint(model.blocks[0], value, backend="unsloth", **SMALL)
        value.zero_()
        return model.blocks[1](output)

    assert_equal(plain, step(model, run))


def test_nothing_is_moved_by_a_checkpoint_without_gradients() -> None:
    model, x = chain(2), inputs()
    testing.release_pool()
    before = testing.pool_bytes()
    with torch.no_grad():
        regions(model, x, backend="unsloth", **SMALL)
    assert testing.pool_bytes() == before


# ---------------------------------------------------------------------- errors


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize(
    "call",
    [
        lambda: lowtide.offload_activations(),
        lambda: lowtide.offload_activations(chain(2)),
        lambda: lowtide.checkpoint(nn.Linear(2, 2), torch.randn(2, 2), backend="unsloth"),
        lambda: lowtide.attach(chain(2), backend="unsloth"),
        lambda: lowtide.attach(chain(2), backend="unsloth", interval=2),
    ],
)
def test_without_an_accelerator_it_is_an_error_that_says_what_to_do(call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs an accelerator .*recomputes.*lowtide\.testing\.cpu_offload"):
        outside(call)


def test_simulation_ends_with_its_block_and_is_of_its_thread() -> None:
    from lowtide.runtime.link import simulated

    seen: list[bool] = []
    outside(lambda: seen.append(simulated.get()))
    with testing.cpu_offload():
        seen.append(simulated.get())
    seen.append(simulated.get())  # the fixture's
    assert seen == [False, True, True]


def test_wrong_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'unsloth'"):
        lowtide.checkpoint(nn.Linear(2, 2), torch.randn(2, 2), backend="unslot")


def test_regions_and_checkpoints_without_a_model_keep_their_bounds_apart() -> None:
    """What a checkpoint's block moves bounds what is in flight; a region around many must not count as one block."""
    options: dict[str, Any] = {"offload_min_bytes": 5}
    model, x = chain(6), inputs()
    regions(model, x, backend="unsloth", **options).sum().backward()
    offload = lowtide.offload_activations(**options)
    with offload:
        output = model(x)
    output.sum().backward()
    regions(model, x, backend="unsloth", **options).sum().backward()
    assert offload._store._largest_block_bytes <= x.nbytes
