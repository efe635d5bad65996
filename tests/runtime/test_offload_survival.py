"""What offload must survive: every shape of call, graph and interruption, as in test_survival.py, with copies that run
as late as they may. Each test sees that something was moved."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import testing
from lowtide.errors import ReplayError
from lowtide.measure.parity import compare, run_step
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.receipt import Receipt
from tests.integration import models
from tests.runtime.links import LateLink, use_link
from tests.runtime.test_survival import ChangesArgument, Fails, PopsSkips, StructuredChain, UsesAll
from tests.runtime.toys import Block, Chain, assert_equal, inputs, second_order, step, twice

DEPTH = 6


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2))


class Transformer(nn.Module):
    """A block with an attention and a feed-forward side that structure shows; counts its forwards."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def transformers(depth: int = DEPTH, dropout: float = 0.1) -> Chain:
    torch.manual_seed(0)
    return Chain([Transformer(dropout=dropout) for _ in range(depth)])


def of_words(*words: str) -> dict[str, Any]:
    """A schedule from the words of the first blocks, repeated over a stack of DEPTH."""
    stack = mixed([words[index % len(words)] for index in range(DEPTH)])
    return {"backend": None, "schedule": Schedule({"blocks": stack})}


WHOLE: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth in twos": {"backend": "unsloth", "interval": 2},
    "unsloth in threes": {"backend": "unsloth", "interval": 3},
    "unsloth, two in four": {"backend": "unsloth", "interval": 2, "segment_stride": 4},
}
ATTENDED: dict[str, dict[str, Any]] = {
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "attention": {"backend": None, "offload_attention": True},
    "attention and ffn": {"backend": "torch-ffn", "offload_attention": True},
    "attention and unsloth-ffn": {"backend": "unsloth-ffn", "offload_attention": True, "interval": 2},
    "attention between segments": {"backend": "unsloth", "interval": 2, "segment_stride": 4, "offload_attention": True},
    "unsloth-selective": {"backend": "unsloth-selective", "interval": 2},
}
MIXED: dict[str, dict[str, Any]] = {
    "all that is saved": of_words("kept+saved"),
    "whole and kept": of_words("whole+boundary", "kept+saved", "kept"),
    "each its own": of_words("kept+saved", "ffn+boundary+attention", "whole+boundary", "selective+boundary+attention"),
    "ffn with the rest": of_words("ffn+saved", "ffn+attention"),
}
PLAIN_BLOCKS = {**WHOLE, "all that is saved": MIXED["all that is saved"], "whole and kept": MIXED["whole and kept"]}
ALL = {**WHOLE, **ATTENDED, **MIXED}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with testing.cpu_offload():
        yield


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLink]:
    link = LateLink()
    use_link(monkeypatch, link)
    yield link
    link.finish()
    assert link.violations == []


def settings(table: dict[str, dict[str, Any]]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("setting", table.values(), ids=table.keys())


def attached(model: nn.Module, **options: Any) -> lowtide.Handle:
    return lowtide.attach(model, **{"offload_min_bytes": 0, **options})


def sized(options: dict[str, Any], depth: int) -> dict[str, Any]:
    """The setting for a stack of another depth."""
    schedule = options.get("schedule")
    if schedule is None:
        return options
    stack = schedule.stacks["blocks"]
    words = ["+".join((stack.treatments[i % DEPTH], *sorted(stack.moves[i % DEPTH]))) for i in range(depth)]
    return {**options, "schedule": Schedule({"blocks": mixed(words)})}


def assert_same_and_moved(model: Any, run: Callable[[], torch.Tensor], **options: Any) -> Receipt:
    """Three steps, each with a plain run's gradients bit for bit; nothing is left after the graph or the handle."""
    options = sized(options, len(model.blocks))
    plain = step(model, run)
    handle = attached(model, **options)
    store = handle._store
    assert store is not None
    for _ in range(3):
        assert_equal(plain, step(model, run))
        receipt = handle.receipt()
        assert receipt.copies.d2h_bytes > 0
        assert receipt.copies.pool["in_use_bytes"] == 0
        assert store.in_flight_bytes == store.ahead_bytes == 0
    handle.detach()
    assert store.pool.total_bytes == 0
    assert_equal(plain, step(model, run))
    return receipt


# ---------------------------------------------------------------------- calls


@settings(ALL)
def test_gradients_and_what_the_receipt_says(setting: dict[str, Any], late: LateLink) -> None:
    model, x = transformers(), inputs()
    # Here attention is plain matrix products, which do not save their result; a selective block holds it, too.
    selective = setting.get("backend") == "unsloth-selective"
    with lowtide.attach(model, backend="torch-selective" if selective else None) as handle:
        step(model, lambda: model(x))
        totals = handle.receipt().totals
        plain_bytes = totals["kept_bytes"] + totals["recomputed_bytes"]
    for block in model.blocks:
        block.calls = 0
    receipt = assert_same_and_moved(model, lambda: model(x), **setting)
    totals, copies = receipt.totals, receipt.copies
    out = sum(sum(sizes) for name, sizes in late.log if name == "copy_out")
    assert out == 3 * copies.d2h_bytes
    assert late.in_bytes == 3 * copies.h2d_bytes
    assert totals["cpu_bytes"] == copies.d2h_bytes
    assert copies.h2d_bytes <= copies.d2h_bytes
    assert totals["kept_bytes"] + totals["cpu_bytes"] + totals["recomputed_bytes"] == pytest.approx(plain_bytes, 0.01)
    assert all((block.cpu_bytes > 0) <= block.treatment.endswith("+offload") for block in receipt.blocks)
    assert any(block.cpu_bytes for block in receipt.blocks)
    counted = [block.calls - 5 for block in model.blocks]  # five steps; what is above are recomputations
    again = [
        3 * b.recompute_calls if b.treatment.split("+")[0] in ("whole", "selective") else 0 for b in receipt.blocks
    ]
    assert counted == again


@settings(PLAIN_BLOCKS)
def test_structured_arguments_and_outputs(setting: dict[str, Any]) -> None:
    model, x = StructuredChain(DEPTH), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_block_returns_its_input_and_a_view_of_it(setting: dict[str, Any]) -> None:
    model, x = UsesAll(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_list_mutated_by_a_block(setting: dict[str, Any]) -> None:
    model, x = PopsSkips(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@dataclasses.dataclass
class Extra:
    text: torch.Tensor
    mask: torch.Tensor | None = None


class TakesViews(Block):
    """Keywords, nested, of which some are views of one storage and some change from call to call."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, extra: Extra, modulation: tuple[torch.Tensor, ...], scale: float
    ) -> torch.Tensor:
        shift, gate = modulation
        mask = 1 if extra.mask is None else extra.mask
        return super().forward(x * scale + extra.text.mean(0) + shift) * gate * mask


class WithViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TakesViews() for _ in range(DEPTH))
        self.modulate = nn.Linear(16, 32 * DEPTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        fused = self.modulate(x).unflatten(-1, (DEPTH, 2, 16))
        for index, block in enumerate(self.blocks):
            mask = None if index % 2 else text[:6].t().contiguous().t()[:, :16].sign()
            pair = (fused[:, index, 0], fused[:, index, 1])
            x = block(x, extra=Extra(text, mask), modulation=pair, scale=0.5)
        return x


@settings(PLAIN_BLOCKS)
@pytest.mark.parametrize("text_from", ["nowhere", "inference mode", "a graph"])
def test_keywords_and_views_of_one_storage(setting: dict[str, Any], text_from: str) -> None:
    model, x, text = WithViews(), inputs(), torch.randn(8, 16)
    if text_from == "inference mode":  # as text encoders may give it
        with torch.inference_mode():
            text = text * 1
    leaf = text.requires_grad_() if text_from == "a graph" else None

    def run() -> torch.Tensor:
        return model(x, text if leaf is None else leaf * 2)

    assert_same_and_moved(model, run, **setting)


@settings(ALL)
def test_frozen_model_with_a_few_trained_weights(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv.bias.requires_grad_(True)
        block.mlp[2].weight.requires_grad_(True)
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(ALL)
def test_autocast(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    assert_same_and_moved(model, run, **setting)


def test_skips_shared_by_blocks_are_copied_once(late: LateLink) -> None:
    class Skips(Block):
        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + skip)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Skips() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skip = x * 2
            for block in self.blocks:
                x = block(x, skip)
            return x

    model, x = Model(), inputs()
    receipt = assert_same_and_moved(model, lambda: model(x), backend="unsloth")
    size = x.nbytes
    assert receipt.copies.d2h_bytes == 4 * size  # the skip, and what three blocks are given; the last one's stays


# ---------------------------------------------------------------------- changed in place


@settings(PLAIN_BLOCKS)
def test_inplace_glue(setting: dict[str, Any]) -> None:
    def glue(index: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if index == 0 else x

    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)], glue), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


@settings(PLAIN_BLOCKS)
def test_changed_argument_is_an_error_while_it_may_still_be_on_the_device(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)]), inputs()
    plain, entry = step(model, lambda: model(x)), x * 1
    with attached(model, **setting):
        hidden = model.blocks[0](entry)
        entry.add_(1)
        hidden = model.blocks[2](model.blocks[1](hidden))
        with pytest.raises(ReplayError, match=r"modified by an inplace"):
            hidden.sum().backward()
        del hidden
        assert_equal(plain, step(model, lambda: model(x)))


@pytest.mark.parametrize("interval", [1, 2])
def test_block_that_changes_its_argument_is_an_error_at_forward(interval: int) -> None:
    torch.manual_seed(0)
    model = Chain([Block(), ChangesArgument(), Block(), Block()])
    handle = attached(model, backend="unsloth", interval=interval)
    with pytest.raises(ReplayError, match=r"blocks\.1.*modified by an inplace"):
        model(inputs())
    gc.collect()
    handle.detach()
    assert handle._store is not None and handle._store.pool.total_bytes == 0


# ---------------------------------------------------------------------- graphs


@settings(ALL)
def test_two_forwards_before_one_backward(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.0), inputs()
    assert_same_and_moved(model, lambda: model(x) * model(x * 2), **setting)


@settings(ALL)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_backward_of_two_graphs_in_both_orders(setting: dict[str, Any], order: tuple[int, int]) -> None:
    model, x = transformers(), inputs()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        losses = [model(x).sum(), model(x * 2).square().sum()]
        grads = []
        for index in order:
            model.zero_grad()
            losses[index].backward()
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads

    plain = run()
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@settings(ALL)
def test_retain_graph_and_backward_twice(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.0), inputs()
    plain = twice(model, x)
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert_equal(plain, twice(model, x))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle.receipt().copies.d2h_bytes > 0


@settings(PLAIN_BLOCKS)
def test_double_backward(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block() for _ in range(DEPTH)]), inputs().requires_grad_()
    plain = second_order(model, x)
    with attached(model, **setting) as handle:
        for _ in range(2):
            assert_equal(plain, second_order(model, x))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@settings(ALL)
def test_dropped_graph_leaves_nothing(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    gc.collect()
    gc.disable()
    try:
        with attached(model, **setting) as handle:
            entry = x * 1
            alive = weakref.ref(entry.untyped_storage())
            output = model(entry)
            assert handle.receipt().copies.pool["in_use_bytes"] > 0
            del entry, output
            assert alive() is None
            assert handle.receipt().copies.pool["in_use_bytes"] == 0
    finally:
        gc.enable()


@settings(ALL)
def test_graph_made_before_detach_runs_backward_after_it_and_takes_the_pool_along(setting: dict[str, Any]) -> None:
    gc.collect()
    testing.release_pool()
    others = testing.pool_bytes()
    model, x = transformers(), inputs()
    plain = step(model, lambda: model(x))
    handle = attached(model, **setting)
    step(model, lambda: model(x))
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x).square().sum()
    handle.detach()
    assert testing.pool_bytes() > others
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]
    del loss
    assert testing.pool_bytes() == others


# ---------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("setting", PLAIN_BLOCKS.values(), ids=PLAIN_BLOCKS.keys())
@pytest.mark.parametrize("place", [0, 2, 5])
def test_exception_in_forward_then_a_good_step(setting: dict[str, Any], place: int) -> None:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block() for _ in range(DEPTH)]
    blocks[place] = Fails(when=2)
    model, x = Chain(blocks), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting) as handle:
        with pytest.raises(MemoryError):
            model(x)
        gc.collect()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle._store is not None and handle._store.in_flight_bytes == 0
        for _ in range(2):
            assert_equal(plain, step(model, lambda: model(x)))
        assert handle.receipt().copies.pool["in_use_bytes"] == 0


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_out_of_memory_in_a_replay_can_be_tried_again(interval: int) -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(), Fails(when=3), Block(), Block(), Block(), Block()]), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, backend="unsloth", interval=interval) as handle:
        model.zero_grad()
        loss = model(x).square().sum()
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@settings(ALL)
@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_out_of_memory_on_the_way_back_can_be_tried_again(
    setting: dict[str, Any], fail_at: int, late: LateLink
) -> None:
    model, x = transformers(dropout=0.0), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting):
        model.zero_grad()
        loss = model(x).square().sum()
        late.fail_at = fail_at
        try:
            loss.backward(retain_graph=True)
        except MemoryError:
            assert late.fail_at < 0
        else:
            assert late.fail_at >= 0
        late.fail_at = None
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]


@settings(ALL)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_moved_without_gradients(setting: dict[str, Any], context: Any, late: LateLink) -> None:
    model, x = transformers(), inputs()
    with attached(model, **setting) as handle:
        model.eval()
        with context():
            model(x)
        assert late.log == []
        assert handle.receipt().copies.pool["buffers"] == 0
        model.train()
        plain = step(model, lambda: model(x))
        moved, calls = handle.receipt().copies.d2h_bytes, len(late.log)
        with context():
            model(x)
        assert len(late.log) == calls
        assert handle.receipt().copies.d2h_bytes == moved > 0
        assert_equal(plain, step(model, lambda: model(x)))


@settings(ALL)
def test_eval_mode_with_gradients_is_treated(setting: dict[str, Any]) -> None:
    model, x = transformers(dropout=0.5).eval(), inputs()
    assert_same_and_moved(model, lambda: model(x), **setting)


def test_frozen_model_without_gradients_moves_nothing(late: LateLink) -> None:
    model, x = transformers().requires_grad_(False), inputs()
    with attached(model, backend="unsloth") as handle:
        model(x)
        late.finish()
        assert handle.receipt().copies.pool["in_use_bytes"] == 0
        assert handle.receipt().totals["cpu_bytes"] == 0


# ---------------------------------------------------------------------- many steps


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


# ---------------------------------------------------------------------- threads


@settings({name: ALL[name] for name in ("unsloth", "unsloth in twos", "attention and ffn", "each its own")})
@pytest.mark.parametrize("shared", [False, True])
def test_two_threads_train_at_once(setting: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # each store with a link of its own
    with testing.cpu_offload():
        trained = [transformers(dropout=0.0)] * 2 if shared else [transformers(dropout=0.0), transformers(dropout=0.0)]
        x, found, errors = inputs(32), {}, []
        parameters = [list(model.parameters()) for model in trained]
        expected = [torch.autograd.grad(trained[k](x * (k + 1)).sum(), parameters[k]) for k in (0, 1)]

        def work(k: int) -> None:
            try:
                for _ in range(8):
                    found[k] = torch.autograd.grad(trained[k](x * (k + 1)).sum(), parameters[k])
            except Exception as error:  # noqa: BLE001  shown in the thread of the test
                errors.append(error)

        handles = [attached(model, **setting) for model in ({id(model): model for model in trained}).values()]
        threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for k in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(expected[k], found[k], strict=True))
        for handle in handles:
            assert handle.receipt().copies.pool["in_use_bytes"] == 0
            handle.detach()


@settings(ALL)
def test_backward_in_another_thread(setting: dict[str, Any]) -> None:
    model, x = transformers(), inputs()
    plain = step(model, lambda: model(x))
    with attached(model, **setting) as handle:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(x).square().sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        assert handle.receipt().copies.d2h_bytes > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(plain[name], parameter.grad), name  # type: ignore[arg-type]


# ---------------------------------------------------------------------- real models

REAL: dict[str, dict[str, Any]] = {
    "unsloth": {"backend": "unsloth"},
    "unsloth in twos": {"backend": "unsloth", "interval": 2},
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "attention": {"backend": None, "offload_attention": True},
    "attention and ffn": {"backend": "torch-ffn", "offload_attention": True},
}
WORDS = ("kept+saved", "ffn+boundary+attention", "whole+boundary", "selective+boundary+attention")


@settings({**REAL, "mixed": {"backend": None}})
@pytest.mark.parametrize("key", ["flux1", "wan21_1_3b"])
def test_diffusers_models(key: str, setting: dict[str, Any], late: LateLink) -> None:
    model, given = models.build(key), models.inputs(key)
    with lowtide.attach(model, backend=None) as handle:
        plain = run_step(model, given)
        depths = {stack.name: len(stack.blocks) for stack in handle.stacks}
    if setting["backend"] is None and not setting.get("offload_attention"):
        words = {name: [WORDS[index % 4] for index in range(depth)] for name, depth in depths.items()}
        setting = {"backend": None, "schedule": Schedule({name: mixed(word) for name, word in words.items()})}
    with attached(model, **setting) as handle:
        for _ in range(2):
            late.log.clear()
            assert [str(difference) for difference in compare(plain, run_step(model, given))] == []
            receipt = handle.receipt()
            totals = receipt.totals
            out = sum(sum(sizes) for name, sizes in late.log if name == "copy_out")
            assert 0 < out == receipt.copies.d2h_bytes == totals["cpu_bytes"]
            assert receipt.copies.h2d_bytes <= receipt.copies.d2h_bytes
            assert receipt.copies.prefetch_misses <= 3
            assert receipt.copies.pool["in_use_bytes"] == 0
        schedule = handle.schedule
    stacks = {name: replace(stack, moves=()) for name, stack in schedule.stacks.items()}
    with lowtide.attach(model, backend=None, schedule=Schedule(stacks)) as handle:
        run_step(model, given)
        on_the_device = handle.receipt().totals
    assert totals["kept_bytes"] + totals["cpu_bytes"] == on_the_device["kept_bytes"]  # moved, and nothing else changed
    assert totals["recomputed_bytes"] == on_the_device["recomputed_bytes"]
