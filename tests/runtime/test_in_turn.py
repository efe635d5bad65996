"""Handles that are attached to one model in turn: what they have in common."""

import torch

from lowtide.controls import CheckpointConfig
from lowtide.handle import attach_as
from lowtide.plan.schedule import Schedule, mixed
from lowtide.runtime.in_turn import InTurn
from lowtide.testing import cpu_offload
from tests.runtime.toys import Block, Chain, assert_equal, step

MEMORY = CheckpointConfig(gradient_checkpointing=False, offload_min_bytes=1)


@cpu_offload()
def test_what_was_pinned_is_used_again_and_freed_at_the_end() -> None:
    model, x = Chain([Block(16) for _ in range(4)]), torch.randn(8, 16)
    plain = step(model, lambda: model(x))
    in_turn = InTurn(MEMORY.offload_pin_memory_max_buckets)
    bytes_of_step = []
    for words in (["kept+saved"] * 4, ["whole+boundary", "kept+saved"] * 2, ["kept"] * 4, ["kept+saved"] * 4):
        with attach_as(model, MEMORY, Schedule({"blocks": mixed(words)}), in_turn=in_turn) as handle:
            for _ in range(2):
                assert_equal(plain, step(model, lambda: model(x)))
            moved = handle.receipt().copies
            bytes_of_step.append((moved.d2h_bytes, in_turn.pool().total_bytes))
    (all_moved, total), (some_moved, same), (none_moved, still), (again, after) = bytes_of_step
    assert all_moved == again > some_moved > none_moved == 0
    assert total == same == still == after >= all_moved
    in_turn.trim()
    assert in_turn.pool().total_bytes == 0
    in_turn.close()


@cpu_offload()
def test_a_graph_that_outlives_all_of_them_keeps_its_values() -> None:
    model, x = Chain([Block(16) for _ in range(4)]), torch.randn(8, 16)
    plain = step(model, lambda: model(x))
    in_turn = InTurn(MEMORY.offload_pin_memory_max_buckets)
    with attach_as(model, MEMORY, Schedule({"blocks": mixed(["kept+saved"] * 4)}), in_turn=in_turn):
        outputs = [model(x)]
    with attach_as(model, MEMORY, Schedule({"blocks": mixed(["kept+saved"] * 4)}), in_turn=in_turn):
        assert_equal(plain, step(model, lambda: model(x)))
    in_turn.close()
    pool = in_turn.pool()
    assert pool.in_use_bytes > 0
    assert_equal(plain, step(model, outputs.pop))
    assert pool.total_bytes == 0
