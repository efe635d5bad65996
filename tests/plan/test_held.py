"""Bytes held by a schedule, on traces made by hand. Storage n has 2**n bytes, so a sum names its parts."""

import pytest

from lowtide.plan.held import HeldTrace, ModuleCall, TensorUse, predict
from lowtide.plan.schedule import Schedule, feed_forwards, keep_all, whole_blocks

GLUE, TEXT, SMALL = 1, 2, 3
WEIGHT = 99


def _tensor(number: int, elements: int = 100, requires_grad: bool = True) -> TensorUse:
    """A tensor with a storage of its own number."""
    return TensorUse(number, number, elements, requires_grad)


def _block(index: int, arguments, outputs, saved, inner=(), stack="blocks") -> ModuleCall:
    return ModuleCall(
        f"{stack}.{index}", stack, index, tuple(arguments), tuple(outputs), frozenset(saved), tuple(inner)
    )


def _chain_of_blocks(depth: int, side: TensorUse | None = None, dead: frozenset[int] = frozenset()) -> HeldTrace:
    """Block i takes tensor 10+i, gives 11+i, and saves its argument and 30+i."""
    sides = [side] if side is not None else []
    calls = [_block(i, [_tensor(10 + i), *sides], [_tensor(11 + i)], {10 + i, 30 + i}) for i in range(depth)]
    return _trace(calls, glue={GLUE}, dead=dead)


def _trace(calls, glue=frozenset(), dead=frozenset()) -> HeldTrace:
    everything = {number: 2**number for number in range(1, 60)}
    saved = frozenset(glue).union(*(call.all_saved for call in calls))
    return HeldTrace(tuple(calls), frozenset(glue), saved - dead, everything)


def _sum(*storages: int) -> int:
    return sum(2**number for number in storages)


def _predict(trace, stack_schedule):
    return predict(trace, Schedule({"blocks": stack_schedule}))


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
    return ModuleCall(name, "chain", place, (_tensor(takes),), (_tensor(gives),), frozenset(saved))


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
