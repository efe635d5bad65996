"""Offload on a CUDA card: gradients, streams, graphs and memory. Collected only where there is a card."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.plan.schedule import Schedule, mixed
from lowtide.units import format_bytes
from tests.gpu.offloading import ALL_MODES, KEYS, SIZES, Work, cut, nearest, spread
from tests.runtime.toys import Block, Chain, step

LUCK = 2
"""How far a gradient may lie from the nearest of ten plain runs, in how far these differ at most: of the many thousand
that are compared some differ by more than any two of ten. What is wrong shows where kernels are deterministic."""
DEPTH = 8
WIDTH = 512
ROWS = 4096


# ------------------------------------------------------------------ gradients


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Kernels that give the same bits every time; new memory is filled with NaN then.

    Not ``warn_only``: with it attention's backward stays as it is.
    """
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("same_bits", [True, False])
def test_gradients_are_within_what_plain_runs_differ_by(key: str, size: str, same_bits: bool) -> None:
    work = SIZES[size](key)
    failures = []
    with deterministic(same_bits):
        plain = [work.gradients() for _ in range(10)]
        allowed = spread(plain)
        for mode in ALL_MODES:
            with work.attach(mode) as handle:
                work.gradients()  # the first step counts bytes, the next are as all that follow
                found = [work.gradients() for _ in range(2)]
                totals = handle.receipt().totals
            if (size, mode) != ("tiny", "torch-selective + attention"):  # tiny heads are padded: no kernel is kept
                assert totals["d2h_bytes"] > 0 < totals["h2d_bytes"], mode
            for gradients in found:
                assert gradients.keys() == plain[0].keys()
                for name, gradient in gradients.items():
                    away = nearest(gradient, name, plain)
                    if not away <= (1 if same_bits else LUCK) * allowed[name]:
                        failures.append((mode, name, away, allowed[name]))
    equal = sum(value == 0 for value in allowed.values())
    print(f"{key} {size} same_bits={same_bits}: {equal} of {len(allowed)} gradients bit-equal in plain runs")
    assert not failures, (len(failures), failures[:5])
    assert not same_bits or equal == len(allowed)


# ------------------------------------------------------------------ a small chain, where plain runs agree bit for bit


CHAIN: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth, interval 2": {"backend": "unsloth", "interval": 2},
    "everything": {"schedule": Schedule({"blocks": mixed(["kept+saved"] * DEPTH)})},
    "in turns": {"schedule": Schedule({"blocks": mixed(["whole+boundary", "kept+saved"] * (DEPTH // 2))})},
    "little ahead": {"schedule": Schedule({"blocks": mixed(["kept+saved"] * DEPTH)}, 1, 1)},
    "all ahead": {"schedule": Schedule({"blocks": mixed(["kept+saved"] * DEPTH)}, 2**40, 2**40)},
}
chains = pytest.mark.parametrize("mode", list(CHAIN))


def chain(width: int = WIDTH) -> Chain:
    torch.manual_seed(0)
    return Chain([Block(width) for _ in range(DEPTH)]).cuda()


def attached(model: nn.Module, mode: str) -> Any:
    return lowtide.attach(model, offload_min_bytes=1, **CHAIN[mode])


def assert_bits(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


@chains
def test_under_another_current_stream(mode: str) -> None:
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")
    plain = step(model, lambda: model(x))
    stream = torch.cuda.Stream()
    with attached(model, mode):
        for _ in range(3):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ours = step(model, lambda: model(x))
            torch.cuda.current_stream().wait_stream(stream)
            assert_bits(plain, ours)
        assert_bits(plain, step(model, lambda: model(x)))  # and back on the default stream, with the same buffers


@chains
def test_blocks_on_two_streams_in_turns(mode: str) -> None:
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")
    plain = step(model, lambda: model(x))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def on_both() -> torch.Tensor:
        y = x
        for index, block in enumerate(model.blocks):
            here, there = (main, side) if index % 2 == 0 else (side, main)
            here.wait_stream(there)
            with torch.cuda.stream(here):
                torch.cuda._sleep(2_000_000)
                y = block(y)
                y.record_stream(there)
        main.wait_stream(side)
        return y

    assert_bits(plain, step(model, on_both))
    with attached(model, mode):
        for _ in range(3):
            assert_bits(plain, step(model, on_both))


@chains
def test_a_busy_compute_stream(mode: str) -> None:
    """The host runs far ahead: everything is issued while the card has not yet begun."""
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")
    plain = step(model, lambda: model(x))
    with attached(model, mode):
        for _ in range(2):
            step(model, lambda: model(x))
        for _ in range(3):
            torch.cuda._sleep(200_000_000)
            ours = step(model, lambda: model(x))
            assert_bits(plain, ours)


@chains
def test_two_graphs_in_flight(mode: str) -> None:
    model = chain()
    x, y = (torch.randn(ROWS, WIDTH, device="cuda") for _ in range(2))

    def both(first: int) -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        losses = [model(x).square().sum(), model(y).sin().sum()]
        losses[first].backward()
        losses[1 - first].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = [both(first) for first in (0, 1)]
    with attached(model, mode) as handle:
        for first in (0, 1, 0, 1):
            assert_bits(plain[first], both(first))
        assert handle.receipt().totals["pool"]["in_use_bytes"] == 0


@chains
def test_a_graph_that_is_kept(mode: str) -> None:
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")

    def thrice() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = thrice()
    with attached(model, mode) as handle:
        for _ in range(2):
            assert_bits(plain, thrice())
        assert handle.receipt().totals["pool"]["in_use_bytes"] == 0


@chains
def test_dropped_graphs_and_steps_between(mode: str) -> None:
    """A graph that is dropped half-way leaves copies behind that nobody reads."""
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")
    plain = step(model, lambda: model(x))

    class Stop(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise Stop

    with attached(model, mode) as handle:
        step(model, lambda: model(x))
        for _ in range(4):
            model(x)
            broken = model.blocks[DEPTH // 2].up.weight.register_hook(stop)  # type: ignore[union-attr]
            with pytest.raises(Stop):
                model(x).square().sum().backward()
            broken.remove()
            assert_bits(plain, step(model, lambda: model(x)))
        gc.collect()
        assert handle.receipt().totals["pool"]["in_use_bytes"] == 0


# ------------------------------------------------------------------ memory


def settle(run: Callable[[], Any], count: int) -> tuple[int, int]:
    """(peak, what is left) in bytes after so many steps."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


@pytest.fixture(scope="module")
def wan() -> Work:
    return cut("wan21_1_3b")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_peak_is_the_same_after_thirty_steps(mode: str, wan: Work) -> None:
    def run() -> None:
        wan.gradients()

    with wan.attach(mode) as handle:
        settle(run, 3)
        first = settle(run, 3)
        pool = handle.receipt().totals["pool"]
        assert settle(run, 27) == first
        assert handle.receipt().totals["pool"] == pool
        assert pool["in_use_bytes"] == pool["fallbacks"] == pool["pageable_bytes"] == 0 < pool["pinned_bytes"]


def test_offload_lowers_the_peak(wan: Work) -> None:
    def peak(mode: str | None) -> int:
        """Over what is there between steps, be it of other tests."""
        with nullcontext() if mode is None else wan.attach(mode):
            settle(wan.gradients, 2)
            most, left = settle(wan.gradients, 1)
            return most - left

    peaks = {mode: peak(mode) for mode in (None, "attention", "torch-ffn + attention", "everything", "unsloth")}
    print({mode: format_bytes(size) for mode, size in peaks.items()})
    assert peaks["attention"] < 0.8 * peaks[None]
    assert peaks["torch-ffn + attention"] < peaks["attention"]
    assert peaks["everything"] < 0.8 * peaks[None]


def test_unsloth_leaves_at_most_two_boundaries_on_the_card() -> None:
    model = chain(1024)
    x = torch.randn(8192, 1024, device="cuda")
    boundary_bytes = x.numel() * x.element_size()

    def held_bytes() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = model(x)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - boundary_bytes  # the output itself
        output.sum().backward()
        return held

    with lowtide.attach(model) as handle:
        held_bytes()
        by_torch = held_bytes()
        assert by_torch >= (DEPTH - 2) * boundary_bytes  # the model's input is held by this test
    with lowtide.attach(model, backend="unsloth") as handle:
        held_bytes()
        assert held_bytes() <= 2 * boundary_bytes
        totals = handle.receipt().totals
        assert totals["kept_bytes"] <= 2 * boundary_bytes + 2**20
        assert totals["d2h_bytes"] >= (DEPTH - 2) * boundary_bytes


@chains
def test_shapes_that_change(mode: str) -> None:
    model = chain()
    inputs = [torch.randn(rows, WIDTH, device="cuda") for rows in (4096, 1024, 3000, 2048, 4096)]
    plain = [step(model, lambda x=x: model(x)) for x in inputs]
    with attached(model, mode) as handle:
        for x in inputs:
            step(model, lambda x=x: model(x))
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        pinned_bytes = handle.receipt().totals["pool"]["pinned_bytes"]
        for _ in range(6):
            for x, expected in zip(inputs, plain, strict=True):
                assert_bits(expected, step(model, lambda x=x: model(x)))
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before_bytes
        pool = handle.receipt().totals["pool"]
        assert pool["in_use_bytes"] == 0
        assert pool["pinned_bytes"] <= 2 * pinned_bytes


@chains
def test_detaching_gives_all_memory_back(mode: str) -> None:
    model, x = chain(), torch.randn(ROWS, WIDTH, device="cuda")
    plain: dict[str, Any] = step(model, lambda: model(x))
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    handle = attached(model, mode)
    output = model(x)
    handle.detach()
    output.square().sum().backward()  # a graph that outlives its handle
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, plain[name]), name
    pool = handle.receipt().totals["pool"]
    assert pool["in_use_bytes"] == pool["pinned_bytes"] == pool["buffers"] == 0
    del output, parameter
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before_bytes


def test_the_receipt_tells_hidden_and_exposed_copies(wan: Work) -> None:
    with wan.attach("everything") as handle:
        for _ in range(3):
            wan.gradients()
        totals = handle.receipt().totals
    milliseconds = totals["hidden_copy_ms"] + totals["exposed_copy_ms"]
    assert math.isfinite(milliseconds) and milliseconds > 0
    assert totals["h2d_bytes"] > 0
    assert totals["d2h_bytes"] == pytest.approx(totals["cpu_bytes"], rel=0.01)
