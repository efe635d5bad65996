"""The way back begins before backward asks for the first thing that moved, whatever runs last."""

import pytest
import torch

import lowtide
from lowtide import families
from lowtide.bench.synthetic import Block, Synthetic
from lowtide.measure.adapter import add_lora
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, fresh, loss_of, run_step
from lowtide.plan.schedule import Schedule, StackSchedule, mixed
from lowtide.runtime.resolve import resolve
from lowtide.testing import cpu_offload

ROWS = ["flux1", "sd3_medium", "sdxl", "sana", "stable_cascade_c", "ltx2_3"]
ENDS = [
    ("kept+attention", "kept"),
    ("kept+saved", "kept"),
    ("kept+saved", "kept+saved"),
    ("whole+boundary", "kept"),
    ("whole+boundary", "whole"),
    ("ffn+boundary", "ffn"),
    ("selective+boundary+attention", "selective"),
    ("selective+boundary+attention", "kept"),
]


def then(word: str, last: str, depth: int) -> StackSchedule:
    return mixed([word] * (depth - 1) + [last])


@pytest.mark.parametrize("key", ROWS)
@pytest.mark.parametrize(("word", "last"), ENDS)
def test_nothing_is_missed_whatever_the_last_block_does(key: str, word: str, last: str) -> None:
    row = families.find(key)
    model, given = build_model(row, "tiny").train(row.train_mode), build_inputs(row.tiny, torch.float32)
    depths = {stack.name: len(stack.blocks) for stack in resolve(model, row.stacks)}
    *first, end = depths
    schedule = Schedule({name: mixed([word] * depths[name]) for name in first} | {end: then(word, last, depths[end])})
    plain = run_step(model, given)
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=1) as handle:
        for _ in range(2):
            assert compare(plain, run_step(model, given)) == []
            copies = handle.receipt().copies
            assert copies.prefetch_misses == 0
            assert 0 < copies.h2d_bytes == copies.d2h_bytes


@pytest.mark.parametrize("key", ["ltx2_3", "flux1"])
@pytest.mark.parametrize(("word", "last"), [("selective+boundary+attention", "kept"), ("kept+saved", "kept")])
@pytest.mark.parametrize("order", ["in order", "reversed", "retained"])
def test_every_backward_wakes_the_way_back(key: str, word: str, last: str, order: str) -> None:
    row = families.find(key)
    model, given = build_model(row, "tiny").train(row.train_mode), build_inputs(row.tiny, torch.float32)
    schedule = Schedule({stack.name: then(word, last, len(stack.blocks)) for stack in resolve(model, row.stacks)})
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=1) as handle:
        losses = [loss_of(model(**fresh(given))) for _ in range(1 if order == "retained" else 2)]
        losses = losses * 2 if order == "retained" else losses[::-1] if order == "reversed" else losses
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        assert handle.receipt().copies.prefetch_misses == 0


@pytest.mark.parametrize(("word", "last"), [("kept+attention", "kept"), ("kept+saved", "ffn")])
def test_what_runs_last_wakes_when_its_feed_forward_side_is_done(word: str, last: str) -> None:
    """By then that side has let its memory go."""
    model, x = Synthetic(4, 32, 2), torch.randn(1, 16, 32)
    end = model.blocks[-1]
    assert isinstance(end, Block)
    ahead: dict[str, int] = {}
    with cpu_offload(), lowtide.attach(model, schedule=_ending(word, last), offload_min_bytes=1) as handle:
        store = handle._store
        assert store is not None

        def note(place: str, tensor: torch.Tensor) -> None:
            def see(_: torch.Tensor) -> None:
                ahead[place] = store.ahead_bytes

            tensor.register_hook(see)

        end.norm2.register_forward_hook(lambda _, __, output: note("feed-forward done", output))
        end.register_forward_pre_hook(lambda _, given: note("block done", given[0]))
        for _ in range(2):
            ahead.clear()
            model(x.clone().requires_grad_()).square().mean().backward()
            assert handle.receipt().copies.prefetch_misses == 0
            assert ahead["feed-forward done"] == 0 < ahead["block done"]


@pytest.mark.parametrize("word", ["whole+boundary", "kept+saved"])
@pytest.mark.parametrize("how", ["before", "after", "forward before"])
def test_compiled_blocks_are_not_reached_into(word: str, how: str) -> None:
    model, x = Synthetic(4, 32, 2), torch.randn(1, 16, 32, requires_grad=True)

    def compile_blocks() -> None:
        for block in model.blocks:
            if how == "forward before":
                block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
            else:
                block.compile(backend="eager", fullgraph=True)

    torch._dynamo.reset()
    if how != "after":
        compile_blocks()
    with cpu_offload(), lowtide.attach(model, schedule=_ending(word, "kept"), offload_min_bytes=1) as handle:
        if how == "after":
            compile_blocks()
        for _ in range(2):
            model(x).square().mean().backward()
            copies = handle.receipt().copies
            assert copies.prefetch_misses == 0 < copies.h2d_bytes
            assert handle.receipt().warnings == ()


def _ending(word: str, last: str) -> Schedule:
    return Schedule({"blocks": then(word, last, 4)})


@pytest.mark.parametrize("word", ["kept+attention", "ffn+attention", "kept+saved", "whole+boundary"])
def test_where_only_the_last_block_would_move_something_nothing_does(word: str) -> None:
    row = families.find("sd3_medium")
    model, given = build_model(row, "tiny"), build_inputs(row.tiny, torch.float32)
    (stack,) = resolve(model, row.stacks)
    schedule = Schedule({stack.name: then("kept", word, len(stack.blocks))})
    plain = run_step(model, given)
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=1) as handle:
        assert compare(plain, run_step(model, given)) == []
        assert handle.receipt().totals["d2h_bytes"] == 0


@pytest.mark.parametrize("key", ROWS)
@pytest.mark.parametrize("backend", ["unsloth-ffn", None])
def test_what_was_packed_last_may_be_gone_by_then(key: str, backend: str | None) -> None:
    """Of frozen feed-forwards nothing is recomputed in the last block: what they were to move is let go again."""
    row = families.find(key)
    model, given = (
        build_model(row, "tiny").train(row.train_mode).requires_grad_(False),
        build_inputs(row.tiny, torch.float32),
    )
    add_lora(model, resolve(model, row.stacks), 4, torch.float32)
    plain = run_step(model, given)
    with (
        cpu_offload(),
        lowtide.attach(model, backend=backend, offload_attention=True, offload_min_bytes=1) as handle,
    ):
        for _ in range(2):
            assert compare(plain, run_step(model, given)) == []
            copies = handle.receipt().copies
            assert copies.prefetch_misses == 0
            assert copies.h2d_bytes > 0
