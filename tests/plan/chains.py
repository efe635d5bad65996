"""Small steps with made-up costs, and every assignment of them, tried one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from lowtide.plan.assignment import Assignment
from lowtide.plan.costs import BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.predict_step import StepPrediction, predict_step
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, SAVED, SELECTIVE, WHOLE

WAYS = [
    (KEPT, (ATTENTION,), 1),
    (KEPT, (SAVED,), 1),
    (FFN, (), 1),
    (FFN, (BOUNDARY, SAVED), 1),
    (WHOLE, (), 1),
    (WHOLE, (BOUNDARY,), 1),
    (WHOLE, (), 2),
    (WHOLE, (BOUNDARY,), 3),
    (SELECTIVE, (ATTENTION,), 1),
]
BYTE_MS = 0.25
LINK = LinkRates(1e3 / 2**30 / BYTE_MS, 1e3 / 2**30 / BYTE_MS / 2)
"""A byte takes a quarter of a ms out, and half a ms back."""

_sizes = st.integers(0, 40)
_reliefs = st.sampled_from((0, 0, 3, 30))
_gradients = st.sampled_from((0, 0, 0, 5, 30))
_times = st.integers(0, 8).map(float)


@st.composite
def treatments(draw: st.DrawFn, way: tuple[str, tuple[str, ...], int]) -> TreatmentCost:
    treatment, moves, blocks = way
    cpu_bytes = draw(_sizes) if moves else 0
    copied_bytes = cpu_bytes + (draw(st.integers(0, 5)) if moves else 0)
    extra_ms = draw(_times), draw(_times)
    sizes = draw(_sizes), cpu_bytes, draw(_sizes), copied_bytes, draw(_reliefs) if moves else 0
    return TreatmentCost(treatment, frozenset(moves), blocks, *extra_ms, *sizes)


@st.composite
def kinds(draw: st.DrawFn) -> BlockKind:
    ways = draw(st.lists(st.sampled_from(WAYS), unique=True, max_size=4))
    plain = TreatmentCost(KEPT, kept_bytes=draw(_sizes), working_bytes=draw(_sizes))
    kind = BlockKind(draw(_times), draw(_times), (plain, *(draw(treatments(way)) for way in ways)))
    return kind.with_gradients(draw(_gradients))


@st.composite
def steps(draw: st.DrawFn, most_blocks: int = 6) -> StepCosts:
    """Blocks of up to three kinds in up to three stacks."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    blocks = draw(st.lists(st.sampled_from(names), min_size=1, max_size=most_blocks))
    first, second = sorted((draw(st.integers(0, len(blocks))), draw(st.integers(0, len(blocks)))))
    return StepCosts(
        {name: draw(kinds()) for name in names},
        {"first": tuple(blocks[:first]), "second": tuple(blocks[first:second]), "third": tuple(blocks[second:])},
        resident_bytes=draw(_sizes),
        elsewhere_bytes=draw(st.sampled_from((0, 0, 60))),
        other_ms=draw(_times),
        link=draw(st.sampled_from((LINK, LINK, None))),
        host_limit_bytes=draw(st.none() | st.integers(0, 100)),
        in_flight_share=draw(st.sampled_from((1.0, 1.0, 0.6, 0.0))),
        in_flight_known_bytes=draw(st.sampled_from((10, 1000))),
    )


@st.composite
def relieved_steps(draw: st.DrawFn) -> StepCosts:
    """Steps in which what runs last needs less room beside it where some block is reached into."""
    costs = replace(draw(steps(5)), link=LINK)
    reliefs = {name: draw(_reliefs) for name in costs.kinds}
    kinds = {
        name: replace(
            kind,
            treatments=tuple(
                cost if cost.moves or cost.blocks > 1 else replace(cost, relief_bytes=reliefs[name])
                for cost in kind.treatments
            ),
        )
        for name, kind in costs.kinds.items()
    }
    return replace(costs, kinds=kinds)


@st.composite
def limited_steps(draw: st.DrawFn) -> StepCosts:
    """Steps of which less fits in CPU memory than could move."""
    costs = draw(steps(5).filter(lambda costs: most_waiting(costs) > 0))
    limit_bytes = draw(st.integers(0, most_waiting(costs) - 1))
    return replace(costs, link=LINK, host_limit_bytes=limit_bytes)


def most_waiting(costs: StepCosts) -> int:
    """Bytes in CPU memory, if every block moved the most that it can."""
    most = {name: max(cost.cpu_bytes for cost in kind.treatments) for name, kind in costs.kinds.items()}
    return sum(most[kind] for kinds in costs.stacks.values() for kind in kinds)


def every_assignment(costs: StepCosts) -> Iterator[tuple[Assignment, StepPrediction]]:
    """All that can run: what runs last stays, nothing moves without a link, CPU memory is not exceeded."""
    stacks = [list(_every_stack(costs, kinds)) for kinds in costs.stacks.values()]
    for chosen in itertools.product(*stacks):
        assignment = dict(zip(costs.stacks, chosen, strict=True))
        flat = [cost for part in chosen for cost in part]
        if flat[-1].moves or (costs.link is None and any(cost.moves for cost in flat)):
            continue
        prediction = predict_step(costs, assignment)
        if costs.host_limit_bytes is None or prediction.cpu_bytes <= costs.host_limit_bytes:
            yield assignment, prediction


def _every_stack(costs: StepCosts, kinds: tuple[str, ...]) -> Iterator[tuple[TreatmentCost, ...]]:
    if not kinds:
        yield ()
        return
    for cost in costs.kinds[kinds[0]].treatments:
        if len(kinds) >= cost.blocks and set(kinds[: cost.blocks]) == {kinds[0]}:
            for rest in _every_stack(costs, kinds[cost.blocks :]):
                yield (cost, *rest)
