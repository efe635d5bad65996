"""A plan for people and for programs: what is kept, moved and recomputed, what that costs, and what was rejected."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from lowtide.plan.answer import Alternative, Plan
from lowtide.plan.costs import FORECAST
from lowtide.plan.predict_step import Position, StepPrediction
from lowtide.plan.schedule import (
    ATTENTION,
    BOUNDARY,
    FFN,
    IN_SEGMENTS,
    KEPT,
    SAVED,
    SELECTIVE,
    WHOLE,
    Schedule,
    StackSchedule,
)
from lowtide.units import format_bytes

_FEW_TOKENS = 2048
"""Of a block, under which recomputation and offload hardly pay."""

_DOES = {
    KEPT: "kept on the device",
    FFN: "feed-forward side recomputed",
    WHOLE: "recomputed whole",
    SELECTIVE: "recomputed, but for the outputs of attention kernels",
}
_MOVES = {
    (KEPT, ATTENTION): "what the attention side saves",
    (KEPT, SAVED): "all that is saved",
    (FFN, BOUNDARY): "the inputs of the feed-forward side",
    (FFN, ATTENTION): "what the attention side saves",
    (FFN, SAVED): "all else that is saved",
    (WHOLE, BOUNDARY): "the inputs",
    (SELECTIVE, BOUNDARY): "the inputs",
    (SELECTIVE, ATTENTION): "those outputs",
}
_ONLY_MOVED = "not recomputed"
_MOST_SHOWN = 6
TOO_MUCH, TOO_MUCH_CPU, SLOWER, NO_BETTER = "over the budget", "too much for CPU memory", "slower", "no better"
CHOSEN = "chosen"


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for JSON. Bytes and ms; blocks as ``plan.schedule.mixed`` writes them."""
    made = plan.prediction
    return {
        "budget_bytes": plan.budget_bytes,
        "leave_it_off": plan.leaves_off,
        "fixed_setting": plan.mode,
        "source": plan.source,
        "predicted": prediction_dict(made),
        "stacks": {name: list(_lines(stack)) for name, stack in plan.schedule.stacks.items()},
        "alternatives": [
            {
                "name": other.name,
                "peak_bytes": other.peak_bytes,
                "step_ms": other.step_ms,
                "cpu_bytes": other.cpu_bytes,
                "verdict": verdict(plan, other),
            }
            for other in plan.alternatives
        ],
        "within_ms": plan.within_ms,
    }


def prediction_dict(made: StepPrediction) -> dict[str, Any]:
    """Of one step; where backward needs the most, as plain data."""
    highest = made.highest
    return {
        "step_ms": made.step_ms,
        "plain_ms": made.plain_ms,
        "recomputing_ms": made.extra_ms,
        "waiting_for_copies_ms": made.exposed_out_ms + made.exposed_back_ms,
        "peak_bytes": made.peak_bytes,
        "cpu_bytes": made.cpu_bytes,
        "copied_bytes": made.copied_bytes,
        "highest": {
            "stack": highest.stack,
            "block": highest.first,
            "held_bytes": highest.held_bytes,
            "working_bytes": highest.working_bytes,
            "in_flight_bytes": highest.in_flight_bytes,
        },
    }


def verdict(plan: Plan, other: Alternative) -> str:
    """Why a fixed setting was not taken, or that it was."""
    if other.name == plan.mode:
        return CHOSEN
    if other.peak_bytes > plan.budget_bytes:
        return TOO_MUCH
    if plan.host_limit_bytes is not None and other.cpu_bytes > plan.host_limit_bytes:
        return TOO_MUCH_CPU
    return SLOWER if other.step_ms > plan.prediction.step_ms * (1 + 1e-6) else NO_BETTER


def in_words(plan: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join((*_answer(plan), *_treatments(plan.schedule), *_cost(plan), *_rejected(plan), *_doubts(plan)))


def _answer(plan: Plan) -> Iterator[str]:
    peak, budget = format_bytes(plan.prediction.peak_bytes), format_bytes(plan.budget_bytes)
    if plan.leaves_off:
        yield f"Leave checkpointing off: the plain run fits, with a peak of {peak} of {budget}."
    elif plan.mode is not None:
        yield f"Use {plan.mode}: nothing is quicker within {budget}. Peak {peak}."
    else:
        yield f"A schedule for a budget of {budget}: peak {peak}."


def _treatments(schedule: Schedule) -> Iterator[str]:
    for name, stack in schedule.stacks.items():
        yield f"{name}:"
        for what, places in places_by_treatment(_lines(stack)).items():
            word = "block" if len(places) == 1 and "–" not in places[0] else "blocks"
            yield f"  {word} {', '.join(places)}: {what}"


def places_by_treatment(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Of the lines of a stack (``as_dict``): what is done, and with which blocks: ``["0–3", "8"]``."""
    places: dict[str, list[str]] = {}
    for line in lines:
        first, last = line["first"], line["last"]
        places.setdefault(line["what"], []).append(f"{first}" if first == last else f"{first}–{last}")
    return places


def _lines(stack: StackSchedule) -> Iterator[dict[str, Any]]:
    """Neighbouring blocks that are treated alike. segment: blocks that are recomputed together; None: none are."""
    blocks = [
        (index, (treatment, moves, _width(stack, index)))
        for index, (treatment, moves) in enumerate(zip(stack.treatments, stack.moves, strict=True))
    ]
    for (treatment, moves, width), group in groupby(blocks, key=lambda block: block[1]):
        indices = [index for index, _ in group]
        yield {
            "first": indices[0],
            "last": indices[-1],
            "treatment": treatment,
            "moves": sorted(moves),
            "segment": width,
            "what": _what(treatment, moves, width),
        }


def _width(stack: StackSchedule, index: int) -> int | None:
    segment = stack.segments[index]
    return len(stack.blocks_of(segment)) if stack.treatments[index] in IN_SEGMENTS and segment is not None else None


def _what(treatment: str, moves: frozenset[str], width: int | None) -> str:
    text = _ONLY_MOVED if treatment == KEPT and moves else _DOES[treatment]
    if width is not None and width > 1:
        text += f", {width} at a time"
    if moves:
        text += "; in CPU memory: " + " and ".join(_MOVES[treatment, what] for what in sorted(moves, reverse=True))
    return text


def _cost(plan: Plan) -> Iterator[str]:
    made = plan.prediction
    yield f"A step takes {ms_in_words(made.step_ms)}{_added(made)}."
    if made.copied_bytes:
        copied, waiting = format_bytes(made.copied_bytes), format_bytes(made.cpu_bytes)
        yield f"{copied} are copied out, and as much back; {waiting} wait in CPU memory."
    if made.elsewhere_bytes > made.highest.peak_bytes:
        yield "The peak is outside of the blocks, where no schedule lowers it."
    else:
        yield _peak(made.highest)


def ms_in_words(time_ms: float) -> str:
    """``"541.0 ms"``, ``"1.94 s"``."""
    return f"{time_ms:.1f} ms" if time_ms < 1000 else f"{time_ms / 1e3:.2f} s"


def _added(made: StepPrediction) -> str:
    """What the time consists of, where it is not that of the plain step."""
    waiting_ms = made.exposed_out_ms + made.exposed_back_ms
    again = "for computing again and copying" if made.copied_bytes else "for computing again"
    parts = {again: made.extra_ms, "of waiting for copies": waiting_ms}
    told = [
        f"{ms_in_words(time_ms)} ({100 * time_ms / made.plain_ms:+.1f} %) {what}"
        for what, time_ms in parts.items()
        if round(time_ms, 1)
    ]
    return ", ".join((f": {ms_in_words(made.plain_ms)} without checkpointing", *told)) if told else ""


def _peak(highest: Position) -> str:
    sizes = (highest.held_bytes, highest.working_bytes, highest.in_flight_bytes)
    held, working, in_flight = (format_bytes(size_bytes) for size_bytes in sizes)
    return (
        f"The peak is in backward at block {highest.first} of {highest.stack}: {held} are held (weights and the like "
        f"included), {working} are worked on, {in_flight} are in flight."
    )


def _rejected(plan: Plan) -> Iterator[str]:
    """Those that fit, the quickest first, then others in their order; at most six."""
    rejected = [(other, verdict(plan, other)) for other in plan.alternatives if other.name != plan.mode]
    fitting = [(other, why) for other, why in rejected if why not in (TOO_MUCH, TOO_MUCH_CPU)]
    fitting.sort(key=lambda found: found[0].step_ms)
    ordered = fitting + [found for found in rejected if found not in fitting]
    if rejected:
        yield "Compared with, and not taken:"
    for other, why in ordered[:_MOST_SHOWN]:
        yield f"  {other.name}: peak {format_bytes(other.peak_bytes)}, {ms_in_words(other.step_ms)} ({why})"
    if more := Counter(why for _, why in ordered[_MOST_SHOWN:]):
        yield f"  and {more.total()} more: " + ", ".join(f"{count} {why}" for why, count in more.items())


def _doubts(plan: Plan) -> Iterator[str]:
    if plan.source == FORECAST:
        yield "Times are forecast from shapes, not measured: the order of close settings may differ."
    if plan.within_ms:
        yield f"The search was stopped: another schedule may be quicker, by {ms_in_words(plan.within_ms)} at most."


def of_few_tokens(tokens: int) -> Iterator[str]:
    """What there is to say of blocks with so many tokens; 0: unknown. Of many there is nothing."""
    if 0 < tokens < _FEW_TOKENS:
        yield (
            f"A block has {tokens:,} tokens at most. Under {_FEW_TOKENS:,} activations are small beside what else lies "
            "on the device, and the host decides how long a step takes: recomputation and offload may not pay."
        )
