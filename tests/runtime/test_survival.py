"""What a segment must survive: every shape of call, graph and interruption. Each test counts what was recomputed."""

import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide import families
from lowtide.errors import ConfigError, ReplayError
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from tests.runtime.toys import (
    Block,
    Chain,
    assert_equal,
    assert_same_as_plain,
    chain,
    inputs,
    second_order,
    step,
    twice,
)

INTERVALS = [{}, {"interval": 2}, {"interval": 3}, {"interval": 2, "segment_stride": 4}]


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    extra: Any = None


class Structured(nn.Module):
    """Takes and returns nested tuples, dicts, dataclasses and None."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = Block(width)

    def forward(self, state: State, pair: tuple[Any, Any], *, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        hidden = self.inner(state.hidden * options["scale"] + pair[0]["shift"])
        return State(hidden, (None, pair[1])), {"hidden": hidden * 2, "none": None}


class StructuredChain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Structured() for _ in range(depth))
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, shift = State(x), self.shift * 2
        for block in self.blocks:
            state, extra = block(state, ({"shift": shift}, None), options={"scale": 0.5, "name": "x"})
        return state.hidden + extra["hidden"]


@pytest.mark.parametrize("setting", INTERVALS)
def test_structured_arguments_and_outputs(setting: dict[str, int]) -> None:
    model, x = StructuredChain(5), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), **setting)
    treated = [block for block in receipt.blocks if block.treatment == "whole"]
    assert all(block.recompute_calls == 1 for block in treated)
    assert not receipt.fallbacks


class ReturnsInput(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x, x[:, :8]


class UsesAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ReturnsInput() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for block in self.blocks:
            x, same, view = block(x)
            total = total + same.sin().sum() + view.cos().sum()
        return x + total


@pytest.mark.parametrize("setting", INTERVALS)
def test_block_returns_its_input_and_a_view_of_it(setting: dict[str, int]) -> None:
    model, x = UsesAll(), inputs().requires_grad_()
    receipt = assert_same_as_plain(model, lambda: model(x), **setting)
    assert receipt.totals["recompute_calls"] > 0


class PopsSkips(nn.Module):
    """A U-shape whose blocks push to and pop from a list that they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Skipping(index < 2) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        return x


class _Skipping(nn.Module):
    def __init__(self, down: bool) -> None:
        super().__init__()
        self.down, self.inner = down, Block()

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        if not self.down:
            return self.inner(x + skips.pop())
        out = self.inner(x)
        skips.append(out)
        return out


@pytest.mark.parametrize("setting", INTERVALS[:3])
def test_list_mutated_by_a_block(setting: dict[str, int]) -> None:
    model, x = PopsSkips(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4, **setting)


def test_skip_tensor_between_blocks_is_carried_by_the_segment() -> None:
    kept: list[torch.Tensor] = []

    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            kept[:] = [x]
        return x + kept[0] if index == 2 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(6)], glue), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=6, interval=3)
    assert receipt.fallbacks == ()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=6, interval=4)
    assert [note.subject for note in receipt.fallbacks] == ["blocks.3"]
    assert "AddBackward0" in receipt.fallbacks[0].reason


def test_hidden_state_capture_needs_no_fallback() -> None:
    captured: list[torch.Tensor] = []

    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        captured.append(x)
        return x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(4)], glue), inputs()

    def run() -> torch.Tensor:
        captured.clear()
        return model(x) + sum(hidden.sin() for hidden in captured)

    receipt = assert_same_as_plain(model, run, recomputed=4, interval=2)
    assert receipt.fallbacks == ()


def test_inplace_glue_ends_the_segment() -> None:
    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if index == 0 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(4)], glue), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=4, interval=2)
    assert [note.subject for note in receipt.fallbacks] == ["blocks.1"]


def test_inplace_change_of_an_external_before_backward_is_an_error() -> None:
    model, x = chain(2), inputs()
    with lowtide.attach(model):
        entry = x * 1
        loss = model(entry).sum()
        entry.add_(1)
        with pytest.raises(ReplayError, match=r"blocks\.0 .*modified by an inplace"):
            loss.backward()


class ChangesArgument(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def test_block_that_changes_its_argument_is_an_error_at_forward() -> None:
    torch.manual_seed(0)
    model = Chain([Block(), ChangesArgument()])
    with lowtide.attach(model), pytest.raises(ReplayError, match=r"blocks\.1.*modified by an inplace"):
        model(inputs())


def test_frozen_prefix_is_not_recomputed() -> None:
    model, x = chain(4), inputs()
    model.blocks[:3].requires_grad_(False)
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=1)
    assert [block.reason for block in receipt.blocks[:3]] == ["nothing in it needed a gradient"] * 3
    assert receipt.blocks[0].kept_bytes == 0


@pytest.mark.parametrize("setting", INTERVALS)
def test_lora_only_in_a_late_layer_of_each_block(setting: dict[str, int]) -> None:
    model, x = chain(5), inputs()
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    assert_same_as_plain(model, lambda: model(x), **setting)


def test_retain_graph_and_backward_twice() -> None:
    model, x = chain(), inputs()
    plain = twice(model, x)
    for setting in INTERVALS:
        with lowtide.attach(model, **setting):  # type: ignore[arg-type]
            assert_equal(plain, twice(model, x))


def test_double_backward() -> None:
    model, x = chain(), inputs().requires_grad_()
    plain = second_order(model, x)
    for setting in INTERVALS:
        with lowtide.attach(model, **setting) as handle:  # type: ignore[arg-type]
            assert_equal(plain, second_order(model, x))
            assert handle.receipt().totals["recompute_calls"] > 0


def test_two_forwards_before_one_backward_and_interleaved() -> None:
    model, x = chain(), inputs()

    def run() -> torch.Tensor:
        first, second = model(x), model(x * 2)
        return first * second

    for setting in INTERVALS[:3]:
        assert_same_as_plain(model, run, recomputed=8, **setting)


def test_backward_of_an_older_graph_after_a_newer_forward() -> None:
    model, x = chain(dropout=0.3), inputs()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        older, newer = model(x).sum(), model(x * 2).square().sum()
        grads = []
        for loss in (older, newer):
            model.zero_grad()
            loss.backward()
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads

    plain = run()
    with lowtide.attach(model, interval=2):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))


def test_gradient_accumulation() -> None:
    model, x = chain(dropout=0.2), inputs()

    def accumulate() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        for scale in (1.0, 2.0, 3.0):
            model(x * scale).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = accumulate()
    with lowtide.attach(model, interval=2) as handle:
        assert all(torch.equal(a, b) for a, b in zip(plain, accumulate(), strict=True))
        assert handle.receipt().totals["recompute_calls"] == 4  # the receipt is of the last micro-batch


def test_dropped_graph_leaves_nothing() -> None:
    model, x = chain(), inputs()
    gc.collect()
    gc.disable()
    try:
        with lowtide.attach(model, interval=2):
            entry = x * 1
            alive = weakref.ref(entry.untyped_storage())
            output = model(entry)
            del entry, output
            assert alive() is None
    finally:
        gc.enable()


class Fails(Block):
    def __init__(self, when: int) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls + 1 == self.when:
            self.calls += 1
            raise MemoryError("no memory left")
        return super().forward(x)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_exception_in_forward_then_a_good_step(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Block(), Fails(when=2), Block()]), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=interval) as handle:
        with pytest.raises(MemoryError):
            model(x)
        assert_equal(plain, step(model, lambda: model(x)))
        assert handle.receipt().totals["recompute_calls"] == 4


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_out_of_memory_in_a_replay_can_be_tried_again(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Fails(when=3), Block(), Block()]), inputs()
    plain = step(model, lambda: model(x))  # call 1; the forward below is call 2, its replay call 3
    with lowtide.attach(model, interval=interval):
        model.zero_grad()
        loss = model(x).square().sum()
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["torch", "torch-ffn", "torch-selective"])
def test_an_error_inside_a_block_leaves_nothing_of_its_step(backend: str) -> None:
    """In the first step under a handle too, whose bytes are counted."""
    row = families.find("wan21_1_3b")
    model: Any = build_model(row, "tiny").train()
    given, made = build_inputs(row.tiny, torch.float32), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: made.append(StorageWeakRef(output.untyped_storage())))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    with lowtide.attach(model, backend=backend):
        for _ in range(2):
            hook = model.blocks[-1].ffn.net[2].register_forward_pre_hook(fail)
            with pytest.raises(torch.OutOfMemoryError):
                model(**given)
            hook.remove()
            gc.collect()
            assert made and all(storage.expired() for storage in made)


def test_base_exception_in_a_block_is_not_swallowed() -> None:
    class Interrupted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Chain([Block(), Interrupted()])
    with lowtide.attach(model, interval=2), pytest.raises(KeyboardInterrupt):
        model(inputs())


def test_backward_in_another_thread() -> None:
    model, x = chain(dropout=0.3), inputs()
    plain = step(model, lambda: model(x))
    with lowtide.attach(model, interval=2) as handle:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(x).square().sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        assert handle.receipt().totals["recompute_calls"] == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]


def test_two_threads_train_one_model_at_once() -> None:
    model, x = chain(8), inputs(64)
    expected = [torch.autograd.grad(model(x * k).sum(), list(model.parameters())) for k in (1, 2)]
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(5):
            found[k] = torch.autograd.grad(model(x * k).sum(), list(model.parameters()))

    with lowtide.attach(model, interval=2):
        workers = [threading.Thread(target=work, args=(k,)) for k in (1, 2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for k in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(expected[k - 1], found[k], strict=True))


def test_module_called_twice_and_shared_modules() -> None:
    torch.manual_seed(0)
    shared, other, third = Block(), Block(), Block()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([shared, other, shared, third])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(block(x))
            return x

    model, x = Twice(), inputs()
    for setting in ({}, {"interval": 2}, {"interval": 3}):
        assert_same_as_plain(model, lambda: model(x), recomputed=8, **setting)


def test_a_block_called_again_and_again_does_not_join_one_segment_for_ever() -> None:
    model, x = chain(2), inputs()

    def run() -> torch.Tensor:
        out = x
        for _ in range(5):
            out = model.blocks[0](out)
        return out

    receipt = assert_same_as_plain(model, run, recomputed=5, interval=2)
    assert receipt.blocks[1].reason == "not called"


def test_eval_mode_with_gradients_is_treated() -> None:
    model, x = chain(dropout=0.5).eval(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_happens_without_gradients(context: Any) -> None:
    model, x = chain(), inputs()
    with lowtide.attach(model, interval=2) as handle:
        with context():
            model(x)
        assert all(block.reason == "not called" for block in handle.receipt().blocks)
        assert handle.receipt().warnings
        step(model, lambda: model(x))
        with context():
            model(x)
        assert handle.receipt().totals["recompute_calls"] == 4


def test_opaque_argument_keeps_the_block_and_says_so() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

    class Caching(Block):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
            cache.seen.append(x)
            return super().forward(sum(cache.seen))  # type: ignore[arg-type]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Caching() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            for block in self.blocks:
                x = block(x, cache)
            return x

    model, x = Model(), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=0, interval=2)
    assert {block.treatment for block in receipt.blocks} == {"kept"}
    assert all("Cache" in note.reason for note in receipt.fallbacks)
    assert len(receipt.fallbacks) == 3


def test_saved_tensors_read_inside_a_block() -> None:
    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                out = super().forward(x)
                (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            return out + grad

    torch.manual_seed(0)
    model, x = Chain([Inner() for _ in range(3)]), inputs().requires_grad_()
    for setting in INTERVALS[:3]:
        receipt = assert_same_as_plain(model, lambda: model(x), **setting)
        assert receipt.totals["recompute_calls"] >= 3


def test_no_memory_is_kept_over_a_hundred_steps_evaluations_and_new_shapes() -> None:
    model = chain(3, dropout=0.1)
    with lowtide.attach(model, interval=2) as handle:
        gc.collect()
        before = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        gc.disable()
        try:
            for number in range(100):
                step(model, lambda rows=1 + number % 7: model(inputs(rows)))
                if number % 10 == 0:
                    with torch.no_grad():
                        model(inputs())
                    model(inputs())  # a graph that is dropped
            model.zero_grad(set_to_none=True)
            after = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        finally:
            gc.enable()
        assert after <= before
        assert handle.receipt().totals["recompute_calls"] == 3


def test_two_models_with_different_settings() -> None:
    first, second, x = chain(4), chain(4), inputs()
    plain = step(first, lambda: first(x))
    with lowtide.attach(first, interval=2) as a, lowtide.attach(second, interval=1, segment_stride=2) as b:
        assert_equal(plain, step(first, lambda: first(x)))
        assert_equal(plain, step(second, lambda: second(x)))
        assert a.receipt().totals["recompute_calls"] == 4
        assert b.receipt().totals["recompute_calls"] == 2


def test_second_attach_is_refused_and_leaves_the_first_working() -> None:
    model, x = chain(), inputs()
    with lowtide.attach(model) as handle:
        with pytest.raises(ConfigError, match="attached already"):
            lowtide.attach(model, interval=2)
        step(model, lambda: model(x))
        assert handle.receipt().totals["recompute_calls"] == 4
    assert type(model.blocks[0]) is Block


def test_graph_made_before_detach_runs_backward_after_it() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    handle = lowtide.attach(model, interval=2)
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x).square().sum()
    handle.detach()
    loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("region", [lowtide.checkpoint, torch_checkpoint])
def test_a_segment_does_not_span_two_other_checkpoints(region: Any) -> None:
    """Each is recomputed alone; a segment over both would hand the second one the first one's tensors."""

    class Scaled(Block):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            options = {"use_reentrant": False}
            for block, scale in zip(self.blocks, scales, strict=True):
                x = region(block, x, scale, **options)
            return x

    model, x, scales = Model(), inputs(), torch.randn(4, 6, 16)
    assert_same_as_plain(model, lambda: model(x, scales), interval=2)


def test_storage_exchanged_by_glue_between_blocks() -> None:
    class Adds(Block):
        def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + extra)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Adds() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            extra = torch.randn(6, 16)
            for block in self.blocks:
                x = block(x, extra)
                extra.data = torch.randn(6, 16)
            return x

    model, x = Model(), inputs()
    assert_same_as_plain(model, lambda: model(x), recomputed=4, interval=2)


def test_sparse_arguments() -> None:
    class Mixes(Block):
        def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.sparse.mm(matrix, x).sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Mixes() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            matrix = torch.eye(6).to_sparse()
            for block in self.blocks:
                x = block(x, matrix)
            return x

    model, x = Model(), inputs()
    for setting in INTERVALS:
        receipt = assert_same_as_plain(model, lambda: model(x), **setting)
        assert receipt.totals["recompute_calls"] > 0


def test_saved_tensor_changed_in_place_inside_a_block_is_an_error_as_in_a_plain_run() -> None:
    class Spoils(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = torch.sigmoid(x)
            product = gate.exp()
            gate.mul_(2)
            return super().forward(gate * product)

    torch.manual_seed(0)
    model, x = Chain([Spoils(), Spoils()]), inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).sum().backward()
    with lowtide.attach(model), pytest.raises(ReplayError, match="modified by an inplace"):
        model(x).sum().backward()


def test_forwards_without_backward_do_not_make_the_books_grow() -> None:
    model = chain(2)
    with lowtide.attach(model) as handle:
        for _ in range(40):
            model(inputs())
        storages = handle._ledger.storages
        assert storages is not None
        held = len(storages.held)
        model(inputs())
        assert len(storages.held) == held
        step(model, lambda: model(inputs()))
        assert handle.receipt().totals["recompute_calls"] == 2
