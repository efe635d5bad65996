"""Bytes held by a schedule, on traces made by hand. Storage n has 2**n bytes, so a sum names its parts."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL, HeldTrace, ModuleCall, TensorUse, predict
from lowtide.plan.schedule import (
    ATTENTION,
    BOUNDARY,
    SAVED,
    SELECTIVE,
    Schedule,
    feed_forwards,
    keep_all,
    mixed,
    whole_blocks,
)

GLUE, TEXT, SMALL = 1, 2, 3
WEIGHT = 99


def _tensor(number: int, elements: int = 100, requires_grad: bool = True) -> TensorUse:
    """A tensor with a storage of its own number."""
    return TensorUse(number, number, elements, requires_grad)


def _block(index: int, arguments, outputs, saved, inner=(), stack="blocks") -> ModuleCall:
    return ModuleCall(f"{stack}.{index}", stack, index, tuple(arguments), tuple(outputs), (*saved, *inner))


def _chain_of_blocks(depth: int, side: TensorUse | None = None, dead: frozenset[int] = frozenset()) -> HeldTrace:
    """Block i takes tensor 10+i, gives 11+i, and saves its argument and 30+i."""
    sides = [side] if side is not None else []
    calls = [_block(i, [_tensor(10 + i), *sides], [_tensor(11 + i)], {10 + i, 30 + i}) for i in range(depth)]
    return _trace(calls, glue={GLUE}, dead=dead)


def _trace(calls, glue: Collection[int] = (), dead: Collection[int] = ()) -> HeldTrace:
    everything = {number: 2**number for number in range(1, 60)}
    saved = frozenset(glue).union(*(call.all_saved for call in calls))
    return HeldTrace(tuple(calls), frozenset(glue), saved - set(dead), everything)


def _sum(*storages: int) -> int:
    return sum(2**number for number in storages)


def _predict(trace, stack_schedule, min_bytes=0):
    return predict(trace, Schedule({"blocks": stack_schedule}), min_bytes)


def test_what_is_saved_after_the_attention_side_is_what_was_not_saved_before_its_end():
    attention = ModuleCall("attn", "blocks", 0, (_tensor(10),), (_tensor(11),), (10, 12), ATTENTION_SIDE)
    feed_forward = ModuleCall("ff", "blocks", 0, (_tensor(11),), (_tensor(13),), (12, 14), FEED_FORWARD)
    block = ModuleCall("b", "blocks", 0, (_tensor(9),), (_tensor(15),), (9, attention, 16, feed_forward, 9, 17))
    assert block.saved_after_attention == {14, 16, 17}
    assert replace(block, steps=(9, feed_forward, 17)).saved_after_attention == frozenset()


def test_keeping_everything_is_the_plain_run():
    held = _predict(_chain_of_blocks(3), keep_all(3))
    assert held.held_bytes == held.plain_bytes == _sum(GLUE, 10, 11, 12, 30, 31, 32)
    assert held.kept_bytes == _sum(10, 11, 12, 30, 31, 32)
    assert held.recomputed_bytes == 0 and held.segments == ()


def test_a_segment_keeps_its_first_argument_and_drops_the_rest():
    held = _predict(_chain_of_blocks(3), whole_blocks(3, 2))
    assert held.held_bytes == _sum(GLUE, 10, 12)
    assert held.recomputed_bytes == _sum(11, 30, 31, 32)
    assert held.segments == (("blocks.0", "blocks.1"), ("blocks.2",))


def test_kept_plus_recomputed_is_what_the_blocks_held():
    trace = _chain_of_blocks(8)
    plain = _predict(trace, keep_all(8))
    for schedule in (whole_blocks(8), whole_blocks(8, 3), whole_blocks(8, 2, 4)):
        held = _predict(trace, schedule)
        assert held.kept_bytes + held.recomputed_bytes == plain.kept_bytes


def test_an_argument_that_every_block_takes_counts_once():
    held = _predict(_chain_of_blocks(4, side=_tensor(TEXT)), whole_blocks(4))
    assert held.held_bytes == _sum(GLUE, TEXT, 10, 11, 12, 13)


@pytest.mark.parametrize(
    ("glue_tensor", "segments"),
    [
        (_tensor(40, elements=500), [("blocks.0",), ("blocks.1",)]),  # a new carry: larger than what was made inside
        (_tensor(40, elements=5), [("blocks.0", "blocks.1")]),
        (_tensor(40, elements=500, requires_grad=False), [("blocks.0", "blocks.1")]),
    ],
)
def test_the_largest_new_argument_with_a_gradient_decides_whether_a_segment_goes_on(glue_tensor, segments):
    calls = [
        _block(0, [_tensor(10)], [_tensor(11)], {10}),
        _block(1, [_tensor(11), glue_tensor], [_tensor(12)], {11}),
    ]
    held = _predict(_trace(calls), whole_blocks(2, 2))
    assert list(held.segments) == segments
    assert held.held_bytes == (_sum(10, 11, 40) if len(segments) == 2 else _sum(10, 40))


@pytest.mark.parametrize(
    ("carry", "segments"),
    [((), 2), ((11,), 1), ((11, 40), 2), ((40,), 2), ((10,), 2)],
    ids=["none", "from inside", "one from outside", "from outside", "an earlier argument"],
)
def test_where_a_row_names_the_carry_it_decides_whatever_its_size(carry, segments):
    calls = [
        _block(0, [_tensor(10)], [_tensor(11), _tensor(10)], {10}),
        replace(_block(1, [_tensor(11), _tensor(40, 500), _tensor(10)], [_tensor(12)], {11}), carry=carry),
    ]
    held = _predict(_trace(calls), whole_blocks(2, 2))
    assert len(held.segments) == segments
    assert held.held_bytes == (_sum(10, 40) if segments == 1 else _sum(10, 11, 40))


def test_a_block_that_is_called_again_opens_a_segment_of_its_own():
    calls = [_block(0, [_tensor(10 + i)], [_tensor(11 + i)], {10 + i}) for i in range(3)]
    held = _predict(_trace(calls), whole_blocks(1, 1))
    assert len(held.segments) == 3 and held.held_bytes == _sum(10, 11, 12)


def test_a_block_without_gradients_holds_no_boundary():
    calls = [
        _block(0, [_tensor(10, requires_grad=False)], [_tensor(11, requires_grad=False)], ()),
        _block(1, [_tensor(11, requires_grad=False)], [_tensor(12)], {11, 31}),
    ]
    held = _predict(_trace(calls), whole_blocks(2, 2))
    assert held.segments == (("blocks.1",),)
    assert held.held_bytes == _sum(11)


def test_a_branch_that_dies_unused_is_counted_at_the_call_but_not_held():
    trace = _chain_of_blocks(2, dead=frozenset({11, 31}))
    held = _predict(trace, whole_blocks(2))
    assert held.plain_bytes == _sum(GLUE, 10, 30)
    assert held.held_bytes == _sum(GLUE, 10)
    assert held.kept_bytes + held.recomputed_bytes == _sum(10, 11, 30, 31)
    assert held.segments == (("blocks.0",),)


def _module(name: str, place: int, takes: int, gives: int, saved) -> ModuleCall:
    return ModuleCall(name, "chain", place, (_tensor(takes),), (_tensor(gives),), tuple(saved), FEED_FORWARD)


def test_a_feed_forward_side_keeps_its_first_argument_and_the_rest_of_the_block():
    inner = (_module("norm", 0, 20, 21, {20}), _module("ff", 1, 21, 22, {21, 23}))
    trace = _trace([_block(0, [_tensor(10)], [_tensor(11)], {10, 24}, inner)])
    held = _predict(trace, feed_forwards(1))
    assert held.segments == (("norm", "ff"),)
    assert held.held_bytes == _sum(10, 20, 24)
    assert held.recomputed_bytes == _sum(21, 23)


def test_a_broken_chain_is_two_runs_with_a_boundary_each():
    inner = (_module("up", 0, 20, 21, {20, 21}), _module("down", 1, 25, 26, {25, 27}))
    held = _predict(_trace([_block(0, [_tensor(10)], [_tensor(11)], {10}, inner)]), feed_forwards(1))
    assert held.segments == (("up",), ("down",))
    assert held.held_bytes == _sum(10, 20, 25)


def test_a_last_module_that_saved_only_its_weight_holds_no_input():
    inner = (_module("up", 0, 20, 21, {20, 21}), _module("down", 1, 25, 26, {WEIGHT}))
    held = _predict(_trace([_block(0, [_tensor(10)], [_tensor(11)], {10}, inner)]), feed_forwards(1))
    assert held.segments == (("up",),)
    assert held.held_bytes == _sum(10, 20)


def test_modules_inside_another_one_are_part_of_the_feed_forward_side_too():
    """An attention module that computes the feed-forward as well, as in Flux.2's single blocks."""
    inner = _module("act", 0, 20, 21, {20, 23})
    fused = ModuleCall("attn", "chain", 0, (_tensor(10),), (_tensor(11),), (10, inner), ATTENTION_SIDE)
    trace = _trace([_block(0, [_tensor(10)], [_tensor(11)], (), (fused,))])
    held = _predict(trace, feed_forwards(1))
    assert held.segments == (("act",),)
    assert held.held_bytes == _sum(10, 20) and held.recomputed_bytes == _sum(23)
    assert trace.piece_bytes(("act",)) == _sum(20, 23)


# ---------------------------------------------------------------------- CPU memory


def _attention(takes: int, gives: int, steps) -> ModuleCall:
    return ModuleCall("attn", "block", 0, (_tensor(takes),), (_tensor(gives),), tuple(steps), ATTENTION_SIDE)


def _kernel(takes: int, gives: int, saved) -> ModuleCall:
    results = tuple(storage for storage in saved if storage != takes)
    return ModuleCall("kernel", "block", 0, (_tensor(takes),), (_tensor(gives),), tuple(saved), KERNEL, results)


def _attending_blocks(depth: int, side: TensorUse | None = None) -> HeldTrace:
    """Block i takes 10+i, saves it and, in its attention, 20+i; there the kernel takes 20+i, gives 30+i and saves both
    and 40+i; its feed-forward takes 50+i and saves it."""
    sides = [side] if side is not None else []
    calls = []
    for i in range(depth):
        kernel = _kernel(20 + i, 30 + i, (20 + i, 30 + i, 40 + i))
        attention = _attention(10 + i, 11 + i, (20 + i, kernel, *(use.storage for use in sides)))
        inner = (attention, _module("ff", 0, 50 + i, 55 + i, {50 + i}))
        calls.append(_block(i, [_tensor(10 + i), *sides], [_tensor(11 + i)], (10 + i,), inner))
    return _trace(calls)


@pytest.mark.parametrize(
    ("word", "on_device", "on_cpu", "again"),
    [
        ("kept", (10, 20, 30, 40, 50), (), ()),
        ("kept+attention", (10, 50), (20, 30, 40), ()),
        ("kept+saved", (), (10, 20, 30, 40, 50), ()),
        ("whole", (10,), (), (20, 30, 40, 50)),
        ("whole+boundary", (), (10,), (20, 30, 40, 50)),
        ("ffn+boundary", (10, 20, 30, 40), (50,), ()),
        ("ffn+attention", (10, 50), (20, 30, 40), ()),
        ("ffn+attention+boundary", (10,), (20, 30, 40, 50), ()),
        ("ffn+saved", (), (10, 20, 30, 40, 50), ()),
        ("selective", (10, 30, 40), (), (20, 50)),
        ("selective+attention", (10,), (30, 40), (20, 50)),
        ("selective+boundary", (30, 40), (10,), (20, 50)),
        ("selective+boundary+attention", (), (10, 30, 40), (20, 50)),
    ],
)
def test_each_treatment_moves_what_it_says(word, on_device, on_cpu, again):
    trace = _attending_blocks(1)
    held = _predict(trace, mixed([word]))
    assert held.kept_bytes == held.held_bytes == _sum(*on_device)
    assert held.cpu_bytes == held.d2h_bytes == _sum(*on_cpu)
    assert held.recomputed_bytes == _sum(*again)


def test_kept_moved_and_recomputed_are_what_the_blocks_held():
    trace = _attending_blocks(4)
    plain = _predict(trace, keep_all(4)).kept_bytes
    for words in (["ffn+boundary+attention", "selective+boundary", "kept+saved", "kept"], ["whole+boundary"] * 4):
        held = _predict(trace, mixed(words))
        assert held.kept_bytes + held.cpu_bytes + held.recomputed_bytes == plain
        assert held.cpu_bytes > 0


def test_a_small_storage_stays():
    trace = _attending_blocks(1)
    held = _predict(trace, mixed(["kept+attention"]), min_bytes=2**30)
    assert held.cpu_bytes == _sum(30, 40) and held.held_bytes == _sum(10, 20, 50)
    held = _predict(trace, mixed(["selective+boundary+attention"]), min_bytes=2**40)
    assert held.cpu_bytes == _sum(40) and held.held_bytes == _sum(10, 30)


def test_what_several_blocks_save_moves_once():
    held = _predict(_attending_blocks(3, _tensor(TEXT)), keep_all(3).moving({ATTENTION}))
    assert held.d2h_bytes == _sum(TEXT, 20, 21, 22, 30, 31, 32, 40, 41, 42)


def test_what_a_segment_holds_on_the_device_stays_there_when_an_attention_side_saves_it_later():
    held = _predict(_attending_blocks(2, _tensor(TEXT)), mixed(["whole", "kept+attention"]))
    assert held.cpu_bytes == _sum(21, 31, 41)
    assert held.held_bytes == held.kept_bytes == _sum(TEXT, 10, 11, 51)


def test_what_has_moved_is_not_held_again_by_a_later_segment():
    held = _predict(_attending_blocks(2, _tensor(TEXT)), mixed(["kept+attention", "whole"]))
    assert held.cpu_bytes == _sum(TEXT, 20, 30, 40)
    assert held.held_bytes == _sum(10, 50, 11)


def test_what_a_block_keeps_on_the_device_stays_there_when_its_attention_side_saves_it_later():
    attention = _attention(10, 11, (10, 24))
    held = _predict(_trace([_block(0, [_tensor(10)], [_tensor(11)], (10,), (attention,))]), mixed(["kept+attention"]))
    assert held.cpu_bytes == held.d2h_bytes == _sum(24)
    assert held.kept_bytes == held.held_bytes == _sum(10)


def test_what_has_moved_is_not_kept_again_by_another_block_of_which_something_moves():
    held = _predict(_attending_blocks(2, _tensor(TEXT)), mixed(["kept+attention", "ffn+boundary"]))
    assert held.cpu_bytes == _sum(TEXT, 20, 30, 40, 51)
    assert held.held_bytes == held.kept_bytes == _sum(10, 50, 11, 21, 31, 41)


def test_the_arguments_of_a_block_that_drops_nothing_are_not_copied():
    calls = [
        _block(0, [_tensor(10, requires_grad=False)], [_tensor(11, requires_grad=False)], ()),
        _block(1, [_tensor(11, requires_grad=False)], [_tensor(12)], {11, 31}),
    ]
    held = _predict(_trace(calls), whole_blocks(2).moving({BOUNDARY}))
    assert held.cpu_bytes == held.d2h_bytes == _sum(11)
    assert held.kept_bytes == held.held_bytes == 0


def test_what_a_kept_block_of_which_nothing_moves_saved_is_copied_all_the_same():
    held = _predict(_attending_blocks(2, _tensor(TEXT)), mixed(["kept", "kept+attention"]))
    assert held.d2h_bytes == _sum(TEXT, 21, 31, 41)
    assert held.cpu_bytes == _sum(21, 31, 41)
    assert held.held_bytes == held.kept_bytes == _sum(TEXT, 10, 20, 30, 40, 50, 11, 51)


def test_a_feed_forward_side_that_drops_nothing_copies_nothing():
    inner = (_module("up", 0, 20, 21, {20, 21}), _module("down", 1, 25, 26, {WEIGHT}))
    held = _predict(_trace([_block(0, [_tensor(10)], [_tensor(11)], {10}, inner)]), mixed(["ffn+boundary"]))
    assert held.d2h_bytes == held.cpu_bytes == _sum(20)


def test_what_the_last_segment_is_given_is_on_the_device_though_it_was_copied_for_others():
    trace = _chain_of_blocks(3, side=_tensor(TEXT))
    words = ["whole+boundary", "whole+boundary", "whole"]
    held = _predict(trace, mixed(words))
    assert held.d2h_bytes == held.cpu_bytes == _sum(TEXT, 10, 11)
    assert held.kept_bytes == _sum(12)
    assert held.held_bytes == _sum(GLUE, TEXT, 12)


def test_what_the_graph_saves_as_well_is_on_the_device_though_it_was_copied():
    held = _predict(_attending_blocks(2, _tensor(TEXT)), mixed(["kept+attention", "kept"]))
    assert held.d2h_bytes == _sum(TEXT, 20, 30, 40)
    assert held.held_bytes == _sum(TEXT, 10, 50, 11, 21, 31, 41, 51)


def test_the_order_of_calls_decides_inside_a_block_too():
    """A parallel feed-forward whose input the attention saves as well."""
    attention, module = _attention(20, 21, (20, 24)), _module("ff", 0, 20, 22, {20, 25})
    for inner, on_cpu in (((module, attention), (24,)), ((attention, module), (20, 24))):
        held = _predict(_trace([_block(0, [_tensor(10)], [_tensor(11)], (), inner)]), mixed(["ffn+attention"]))
        assert held.cpu_bytes == _sum(*on_cpu)
        assert held.kept_bytes == _sum(20) - (_sum(20) if 20 in on_cpu else 0)
        assert held.recomputed_bytes == _sum(25)


def test_a_segment_of_several_selective_blocks_holds_the_results_of_each_kernel():
    held = _predict(_attending_blocks(2), whole_blocks(2, 2, treatment=SELECTIVE))
    assert held.segments == (("blocks.0", "blocks.1"),)
    assert held.held_bytes == _sum(10, 30, 31, 40, 41)
    held = _predict(_attending_blocks(2), whole_blocks(2, 2, treatment=SELECTIVE).moving({ATTENTION, BOUNDARY}))
    assert held.held_bytes == 0 and held.cpu_bytes == _sum(10, 30, 31, 40, 41)


def test_weights_never_move():
    trace = _trace([_block(0, [_tensor(10)], [_tensor(11)], (WEIGHT, 10))])
    held = _predict(trace, keep_all(1).moving({SAVED}))
    assert held.cpu_bytes == _sum(10) and held.held_bytes == 0
