"""Schedules, against the rule as the controls state it: block by block, with no arithmetic shared with the code."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.plan.schedule import FFN, KEPT, WHOLE, StackSchedule, feed_forwards, keep_all, whole_blocks

depths = st.integers(0, 70)


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, int, int | None]:
    """(depth, interval, stride), with intervals and strides wider than the stack among them."""
    interval = draw(st.integers(1, 80))
    stride = draw(st.none() | st.integers(interval, 90))
    return draw(depths), interval, stride


def segments_by_walking(depth: int, interval: int, stride: int | None) -> list[list[int]]:
    """The segments, found by walking over the blocks: take ``interval`` of them, skip to the next start, go on."""
    segments, start = [], 0
    while start < depth:
        segments.append([block for block in range(start, start + interval) if block < depth])
        start += stride or interval
    return segments


def segments_of(schedule: StackSchedule) -> list[list[int]]:
    numbers = dict.fromkeys(number for number in schedule.segments if number is not None)
    return [list(schedule.blocks_of(number)) for number in numbers]


@given(settings())
def test_whole_blocks_are_the_segments_that_walking_gives(setting: tuple[int, int, int | None]) -> None:
    schedule = whole_blocks(*setting)
    walked = segments_by_walking(*setting)
    assert segments_of(schedule) == walked
    recomputed = {block for segment in walked for block in segment}
    for block, treatment in enumerate(schedule.treatments):
        assert treatment == (WHOLE if block in recomputed else KEPT)


@given(settings())
def test_every_block_has_exactly_one_treatment_and_segments_are_runs(setting: tuple[int, int, int | None]) -> None:
    depth, interval, stride = setting
    schedule = whole_blocks(*setting)
    assert schedule.depth == len(schedule.segments) == depth
    assert schedule.count(WHOLE) + schedule.count(KEPT) == depth
    for place, segment in enumerate(segments_of(schedule)):
        assert segment == list(range(segment[0], segment[-1] + 1))
        assert segment[0] == place * (stride or interval)
        last = segment[-1] == depth - 1
        assert len(segment) == interval or (last and len(segment) < interval)


@given(settings())
def test_gaps_between_segments_are_kept(setting: tuple[int, int, int | None]) -> None:
    depth, interval, stride = setting
    segments = segments_of(whole_blocks(*setting))
    for before, after in itertools.pairwise(segments):
        assert after[0] - before[-1] - 1 == (stride or interval) - interval
    if stride in (None, interval):
        assert [block for segment in segments for block in segment] == list(range(depth))


@given(depths, st.integers(1, 80))
def test_feed_forward_of_every_nth_block(depth: int, interval: int) -> None:
    schedule = feed_forwards(depth, interval)
    treated, countdown = [], 0
    for block in range(depth):
        if countdown == 0:
            treated.append(block)
            countdown = interval
        countdown -= 1
    assert [block for block, treatment in enumerate(schedule.treatments) if treatment == FFN] == treated
    assert schedule.segments == (None,) * depth


@given(settings())
def test_feed_forward_with_a_stride_treats_the_blocks_of_the_segments(setting: tuple[int, int, int | None]) -> None:
    depth, interval, stride = setting
    stride = interval if stride is None else stride
    walked = {block for segment in segments_by_walking(depth, interval, stride) for block in segment}
    schedule = feed_forwards(depth, interval, stride)
    assert schedule.treatments == tuple(FFN if block in walked else KEPT for block in range(depth))


@given(depths)
def test_keep_all(depth: int) -> None:
    assert keep_all(depth) == StackSchedule((KEPT,) * depth, (None,) * depth)


def test_a_small_example_by_hand() -> None:
    schedule = whole_blocks(7, interval=2, stride=4)
    assert schedule.treatments == (WHOLE, WHOLE, KEPT, KEPT, WHOLE, WHOLE, KEPT)
    assert schedule.segments == (0, 0, None, None, 1, 1, None)
    assert whole_blocks(5, interval=2).segments == (0, 0, 1, 1, 2)
    assert feed_forwards(7, interval=3).treatments == (FFN, KEPT, KEPT, FFN, KEPT, KEPT, FFN)


@pytest.mark.parametrize("make", [whole_blocks, feed_forwards])
@pytest.mark.parametrize(("depth", "interval", "stride"), [(-1, 1, None), (4, 0, None), (4, -2, None), (4, 3, 2)])
def test_impossible_settings_are_refused(make: object, depth: int, interval: int, stride: int | None) -> None:
    with pytest.raises(ValueError, match=r"depth|interval|stride"):
        make(depth, interval, stride)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("treatments", "segments"),
    [((KEPT,), ()), (("recompute",), (None,)), ((WHOLE,), (None,)), ((KEPT,), (0,)), ((FFN,), (0,))],
)
def test_a_schedule_that_contradicts_itself_is_refused(treatments: tuple[str], segments: tuple[int | None]) -> None:
    with pytest.raises(ValueError, match=r"treatment|segment"):
        StackSchedule(treatments, segments)
