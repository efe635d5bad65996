"""What lowtide promises of a step, for every family row and every way to attach.

Tiny models in float32 on the CPU, where "equal" means bit for bit; offload to CPU memory by ``lowtide.testing``.
"""

from lowtide.handle import RUNS_LAST
from lowtide.plan.held import ATTENTION_SIDE, FEED_FORWARD, KERNEL
from lowtide.plan.schedule import ATTENTION, MOVES, SELECTIVE, WHOLE
from tests.contract.cases import trace_of
from tests.contract.modes import OFFLOADS, Observation, expected_treatments


def _close(a: int, b: int, of: int = 0) -> bool:
    """Within 1 % of the larger, or of ``of``."""
    return abs(a - b) <= 0.01 * max(abs(a), abs(b), of)


def _acts(seen: Observation) -> bool:
    """Whether the mode treats or moves anything of this model; where it does not, the receipt must say so.

    SD 1.x with every second feed-forward: these are all ResNets, which have none.
    """
    acts = {block.treatment for block in seen.receipt.blocks} != {"kept"}
    assert acts or "backend" in {note.subject for note in seen.receipt.inert}
    return acts


# ---------------------------------------------------------------------- parity and counts


def test_loss_and_gradients_are_bit_equal(seen: Observation):
    assert seen.differences == ()


def test_exactly_the_scheduled_blocks_run_again(seen: Observation):
    expected = expected_treatments(seen.case, seen.mode)
    recomputed = seen.recomputed_blocks()
    if seen.training == "full":
        assert recomputed == {name for name, treatment in expected.items() if treatment != "kept"}
    for block in seen.receipt.blocks:
        assert block.treatment.removesuffix("+offload") == expected[block.name], block
        # Both streams of a block may share one feed-forward: then it runs twice, but for a last text stream that nobody
        # uses.
        calls = seen.in_forward.get(block.name, 1) if block.name in recomputed else 0
        unused = calls > 1 and block.index == len(seen.schedule.stacks[block.stack].treatments) - 1
        assert block.recompute_calls == seen.again.get(block.name, 0), block
        assert block.recompute_calls in ({1, calls} if unused else {calls}), block
        assert block.recompute_calls == 0 or block.reason in (None, RUNS_LAST), block


def test_attention_runs_again_in_blocks_recomputed_whole_and_nowhere_else(seen: Observation):
    recomputed = seen.recomputed_blocks()
    treatments = {block.name: block.treatment.removesuffix("+offload") for block in seen.receipt.blocks}
    again = [
        kernel
        for block in trace_of(seen.case.row.key, seen.training).calls
        if treatments[block.name] == WHOLE and block.name in recomputed
        for kernel in block.outermost(KERNEL)
    ]
    assert seen.plain_kernels > 0
    assert seen.kernels == seen.plain_kernels + len(again)


# ---------------------------------------------------------------------- bytes


def test_bytes_are_as_predicted(seen: Observation):
    totals, held = seen.receipt.totals, seen.held
    assert _close(totals["kept_bytes"], held.kept_bytes)
    assert _close(totals["recomputed_bytes"], held.recomputed_bytes)
    assert _close(totals["cpu_bytes"], held.cpu_bytes)
    assert _close(totals["d2h_bytes"], held.d2h_bytes)
    freed_bytes = held.plain_bytes - held.held_bytes
    assert (freed_bytes > 0) == _acts(seen)
    # What the model itself keeps alive is not freed by being let go.
    assert seen.freed_bytes <= freed_bytes + 0.01 * held.plain_bytes
    assert seen.freed_bytes >= freed_bytes - seen.tables_bytes - 0.01 * held.plain_bytes


def test_kept_and_moved_and_recomputed_are_what_a_plain_run_holds(seen: Observation):
    totals = seen.receipt.totals
    accounted_bytes = totals["kept_bytes"] + totals["cpu_bytes"] + totals["recomputed_bytes"]
    trace = trace_of(seen.case.row.key, seen.training)
    saved = {storage for block in trace.calls for storage in block.all_saved}
    handed_on = {
        use.storage
        for block in trace.calls
        for call in (block, *block.outermost(FEED_FORWARD), *block.outermost(KERNEL))
        for use in (*call.arguments, *call.outputs)
    }
    plain_bytes = trace.bytes_of(saved)
    assert accounted_bytes >= 0.99 * plain_bytes
    # A checkpoint may have to hold an argument that the plain run does not save.
    assert accounted_bytes <= 1.01 * trace.bytes_of(saved | handed_on)


def test_what_the_receipt_says_was_copied_was_copied(seen: Observation):
    totals = seen.receipt.totals
    assert totals["d2h_bytes"] == seen.out_bytes
    assert totals["h2d_bytes"] == seen.back_bytes
    assert seen.out_bytes >= totals["cpu_bytes"] or _close(seen.out_bytes, totals["cpu_bytes"])


def test_something_moves_exactly_where_the_schedule_has_something_to_move(seen: Observation):
    expected = expected_treatments(seen.case, seen.mode)
    blocks = trace_of(seen.case.row.key, seen.training).calls
    attends = {block.name for block in blocks if any(block.outermost(ATTENTION_SIDE))}
    moving = {
        (block.stack, block.index)
        for block in seen.receipt.blocks
        if seen.schedule.stacks[block.stack].moves[block.index]
        & (MOVES[expected[block.name]] - (set() if block.name in attends else {ATTENTION}))
    }
    for block in seen.receipt.blocks:
        assert block.treatment.endswith("+offload") == ((block.stack, block.index) in moving), block
        assert block.cpu_bytes == 0 or (block.stack, block.index) in moving, block
    # One norm may feed both sides of a block, whose input then is held for attention anyway (Flux.3 Klein).
    assert (seen.out_bytes > 0) == (seen.held.d2h_bytes > 0)
    assert not moving or seen.out_bytes > 0 or "backend" in {note.subject for note in seen.receipt.inert}
    last = seen.receipt.blocks[-1]
    assert not last.treatment.endswith("+offload"), "what runs last is needed at once"
    if seen.mode.backend in OFFLOADS:
        plan = seen.schedule.stacks[last.stack]
        number = plan.segments[-1]
        stay = {(last.stack, index) for index in ([plan.depth - 1] if number is None else plan.blocks_of(number))}
        treated = [b for b in seen.receipt.blocks if b.treatment != "kept" and (b.stack, b.index) not in stay]
        assert bool(treated) == _acts(seen) and all(block.treatment.endswith("+offload") for block in treated)


def test_attention_offload_where_all_attention_is_recomputed_is_inert_and_says_so(seen: Observation):
    inert = {note.subject: note.reason for note in seen.receipt.inert}
    everything_recomputed = {block.treatment.removesuffix("+offload") for block in seen.receipt.blocks} == {WHOLE}
    if seen.mode.offload_attention and everything_recomputed:
        assert seen.out_bytes == 0
        assert inert["offload_attention"] == "attention is recomputed"
    else:
        assert "offload_attention" not in inert


# ---------------------------------------------------------------------- the receipt, and what is left


def test_the_receipt_lists_every_block_of_every_stack_in_order(seen: Observation):
    listed = [(block.stack, block.index, block.name) for block in seen.receipt.blocks]
    assert listed == [
        (stack.name, index, name) for stack in seen.case.stacks for index, (name, _) in enumerate(stack.blocks)
    ]
    in_segments = [block for block in seen.receipt.blocks if block.segment is not None]
    whole = [block for block in seen.receipt.blocks if block.treatment.removesuffix("+offload") in (WHOLE, SELECTIVE)]
    assert {block.name for block in in_segments} == {block.name for block in whole} & seen.recomputed_blocks()
    if in_segments and seen.mode.backend != "mixed":
        _assert_segments(seen, in_segments, **seen.mode.intervals)


def _assert_segments(seen: Observation, blocks, interval: int, segment_stride: int | None = None):
    """Blocks share a segment number only with neighbours of their planned segment."""
    stride = segment_stride or interval
    members: dict[int, list[tuple[str, int]]] = {}
    for block in blocks:
        members.setdefault(block.segment, []).append((block.stack, block.index))
    for segment in members.values():
        indices = [index for _, index in segment]
        assert len({stack for stack, _ in segment}) == 1
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert len({index // stride for index in indices}) == 1
    if seen.case.row.key != "sdxl":  # between its micro-blocks the model makes a new carry
        assert max(map(len, members.values())) == interval


def test_nothing_is_left_after_a_step(seen: Observation):
    assert seen.left_bytes == seen.plain_left_bytes
    assert seen.receipt.totals["pool"].get("in_use_bytes", 0) == 0
