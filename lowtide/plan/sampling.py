"""A step in which each treatment runs on some blocks, and costs corrected by what such steps took. Pure arithmetic.

Blocks of a kind cost the same, so one step can measure several treatments of it, each on blocks of its own, and is a
training step like any other: its gradients are those of a plain run.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lowtide.plan.assignment import Assignment, placed, without_last_move
from lowtide.plan.costs import MEASURED, BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.predict_step import predict_step
from lowtide.plan.schedule import BOUNDARY, FFN, KEPT, SAVED, SELECTIVE, TREATMENTS, WHOLE

_T = TypeVar("_T")
SAMPLED = (KEPT, FFN, SELECTIVE, WHOLE)
"""What takes a time of its own; what moves beside it does not change that."""
_MOST_A_TREATMENT = 3
_AT_EASE = 0.5
"""Of a block's time, that its copies may take where it is timed: by forecast, which may be wrong."""
_PLAIN_RATIO = "plain"
_WORKS_AS = {SELECTIVE: WHOLE}
"""What has all of a block on the device while its backward runs: forecasts of the two were off by the same, within 3
MiB, on nine works on an H200 (``benchmarks/LOG.md``, 2026-12-01)."""


@dataclass(frozen=True)
class Sample:
    """Milliseconds that one block of a kind took under a treatment, waits for copies included."""

    kind: str
    treatment: str
    forward_ms: float
    backward_ms: float


def sampling(costs: StepCosts, budget_bytes: int) -> Assignment | None:
    """Whole blocks, and on some blocks of each kind one of the other treatments each, as far as they fit: with what
    they keep in CPU memory, where that makes them and nobody waits for it.

    Where whole blocks do not fit (with what runs last, or but for that), all that is saved moves instead; None where
    that does not fit either.
    """
    bases = [_whole(costs, moves=costs.link is not None)] + ([_moving(costs)] if costs.link is not None else [])
    bases = [base for each in bases for base in (each, _but_for_the_last(costs, each))]
    chosen = next((base for base in bases if _fits(costs, base, budget_bytes)), None)
    if chosen is None:
        return None
    for stack, index, ways in _wanted(costs):
        before = chosen[stack][index]
        for cost in (*ways, before):
            chosen[stack][index] = cost
            if cost is before or _fits(costs, chosen, budget_bytes):
                break
    return _assignment(costs, chosen)


def corrected(costs: StepCosts, samples: Sequence[Sample], other_ms: float, link: LinkRates | None) -> StepCosts:
    """Costs with measured times. What was not sampled keeps its forecast, corrected as like things turned out.

    other_ms: of a step outside of its blocks.
    """
    found = _Samples(costs, samples)
    kinds = {name: found.corrected(name, kind) for name, kind in costs.kinds.items()}
    return replace(costs, kinds=kinds, other_ms=other_ms, link=link, source=MEASURED)


@dataclass(frozen=True)
class Bytes:
    """What one block of a kind took under a treatment. kept_bytes: on the device; None where something of it moved.
    error_bytes: by how much its backward needed more than was predicted."""

    kind: str
    treatment: str
    kept_bytes: int | None
    error_bytes: int


def bytes_of(
    costs: StepCosts, assignment: Assignment, memory: Mapping[tuple[str, int], tuple[int, int]]
) -> Iterator[Bytes]:
    """What a step under ``assignment`` says. memory: kept and working bytes of each block, by stack and index.

    Nothing of blocks whose attention side or more moves: how much of it was back when their backward began is chance.
    """
    for kind, cost, (kept_bytes, working_bytes) in _alone(costs, assignment, memory):
        if not cost.moves <= {BOUNDARY}:
            continue
        error_bytes = working_bytes - cost.at_work_bytes
        yield Bytes(kind, cost.treatment, None if cost.moves else kept_bytes, error_bytes)


def with_bytes(costs: StepCosts, seen: Sequence[Bytes]) -> StepCosts:
    """The same costs with measured bytes, medians of each kind and treatment; working sets are corrected by the error,
    whatever moves and however many blocks are recomputed together, and where a treatment was not seen, by that of the
    one that works on the same."""
    kinds = {
        name: replace(kind, treatments=tuple(_with_bytes(cost, name, seen) for cost in kind.treatments))
        for name, kind in costs.kinds.items()
    }
    return replace(costs, kinds=kinds)


def _with_bytes(cost: TreatmentCost, kind: str, seen: Sequence[Bytes]) -> TreatmentCost:
    of = {
        treatment: [one for one in seen if (one.kind, one.treatment) == (kind, treatment)] for treatment in TREATMENTS
    }
    like = of[cost.treatment] or of.get(_WORKS_AS.get(cost.treatment, ""), [])
    if not like:
        return cost
    kept = [one.kept_bytes for one in of[cost.treatment] if one.kept_bytes is not None]
    working_bytes = max(0, cost.working_bytes + statistics.median_low([one.error_bytes for one in like]))
    measured = kept and not cost.moves and cost.blocks == 1
    return replace(
        cost,
        kept_bytes=statistics.median_low(kept) if measured else cost.kept_bytes,
        working_bytes=working_bytes,
    )


class _Samples:
    """Medians by kind and treatment, and by how much forecasts were wrong over all kinds."""

    def __init__(self, costs: StepCosts, samples: Sequence[Sample]) -> None:
        groups: dict[tuple[str, str], list[Sample]] = {}
        for sample in samples:
            groups.setdefault((sample.kind, sample.treatment), []).append(sample)
        self._median = {
            key: (
                statistics.median(one.forward_ms for one in group),
                statistics.median(one.backward_ms for one in group),
            )
            for key, group in groups.items()
        }
        self._ratios: dict[str, float] = {}
        kept = {name: kind for name, kind in costs.kinds.items() if (name, KEPT) in self._median}
        forecast_ms = sum(kind.forward_ms + kind.backward_ms for kind in kept.values())
        kept_ms = sum(sum(self._median[name, KEPT]) for name in kept)
        self._kept_ratio = kept_ms / forecast_ms if forecast_ms > 0 else None
        self._inferred = {
            name: found for name, kind in costs.kinds.items() if (found := self._without_extra(name, kind))
        }
        for name in (_PLAIN_RATIO, *SAMPLED[1:]):
            self._ratios[name] = self._ratio(costs, name)

    def corrected(self, name: str, kind: BlockKind) -> BlockKind:
        forward_ms, backward_ms = self._plain(name, kind)
        treatments = tuple(self._treated(name, kind, cost) for cost in kind.treatments)
        return BlockKind(forward_ms, backward_ms, treatments)

    def _plain(self, name: str, kind: BlockKind) -> tuple[float, float]:
        ratio = self._ratios[_PLAIN_RATIO]
        return self._inferred.get(name, (kind.forward_ms * ratio, kind.backward_ms * ratio))

    def _without_extra(self, name: str, kind: BlockKind) -> tuple[float, float] | None:
        """Forward and backward of the plain block. Where only recomputed ones were seen, their forward is the plain
        one; backward is the mean of what each of them says, if all that it computes again takes as much longer than
        forecast as forward does, and of what plain blocks of other kinds do."""
        if (name, KEPT) in self._median:
            return self._median[name, KEPT]
        extra_ms = {cost.treatment: cost.extra_ms for cost in kind.treatments if cost.blocks == 1}
        seen = {treatment: self._median[name, treatment] for treatment in extra_ms if (name, treatment) in self._median}
        if not seen or kind.forward_ms <= 0:
            return None
        forward_ms = statistics.mean(forward_ms for forward_ms, _ in seen.values())
        slower = forward_ms / kind.forward_ms
        said_ms = [ms - slower * extra_ms[treatment] for treatment, (_, ms) in seen.items()]
        if self._kept_ratio is not None:
            said_ms.append(self._kept_ratio * kind.backward_ms)
        return forward_ms, max(0.0, statistics.mean(said_ms))

    def _treated(self, name: str, kind: BlockKind, cost: TreatmentCost) -> TreatmentCost:
        if cost.treatment == KEPT:
            return cost
        extra, copying_ms = self._extra(name, kind, cost.treatment), kind.copying_ms(cost)
        if extra is None:
            ratio, again_ms = self._ratios[cost.treatment], max(0.0, cost.extra_backward_ms - copying_ms)
            extra = cost.extra_forward_ms * ratio / cost.blocks, again_ms * ratio / cost.blocks
        backward_ms = cost.blocks * extra[1] + copying_ms
        return replace(cost, extra_forward_ms=cost.blocks * extra[0], extra_backward_ms=backward_ms)

    def _extra(self, name: str, kind: BlockKind, treatment: str) -> tuple[float, float] | None:
        """Beside the plain block; what came out faster than that takes no extra time."""
        seen = self._median.get((name, treatment))
        if seen is None:
            return None
        plain = self._plain(name, kind)
        return max(0.0, seen[0] - plain[0]), max(0.0, seen[1] - plain[1])

    def _ratio(self, costs: StepCosts, what: str) -> float:
        """Measured over forecast, of all kinds for which both are known; without any, as plain blocks turned out."""
        pairs = list(self._pairs(costs, what))
        forecast = sum(expected for expected, _ in pairs)
        if forecast > 0:
            return sum(measured for _, measured in pairs) / forecast
        return self._ratios.get(_PLAIN_RATIO, 1.0)

    def _pairs(self, costs: StepCosts, what: str) -> Iterator[tuple[float, float]]:
        for name, kind in costs.kinds.items():
            if what == _PLAIN_RATIO:
                if name in self._inferred:
                    yield kind.forward_ms + kind.backward_ms, sum(self._inferred[name])
                continue
            expected = next(
                (cost.extra_ms for cost in kind.treatments if (cost.treatment, cost.blocks) == (what, 1)), None
            )
            measured = self._extra(name, kind, what)
            if expected is not None and measured is not None:
                yield expected, sum(measured)


def samples_of(
    costs: StepCosts, assignment: Assignment, times: Mapping[tuple[str, int], tuple[float, float]]
) -> Iterator[Sample]:
    """What a step under ``assignment`` says. times: forward and backward of each block, in ms, by stack and index."""
    for kind, cost, seen in _alone(costs, assignment, times):
        yield Sample(kind, cost.treatment, *seen)


def _alone(
    costs: StepCosts, assignment: Assignment, seen: Mapping[tuple[str, int], _T]
) -> Iterator[tuple[str, TreatmentCost, _T]]:
    """Kind and treatment of every block that is in no segment with others, and what was seen of it."""
    for stack, index, kind, cost in placed(costs, assignment):
        if cost.blocks == 1 and (stack, index) in seen:
            yield kind, cost, seen[stack, index]


def _whole(costs: StepCosts, moves: bool) -> dict[str, list[TreatmentCost]]:
    """Each block recomputed whole, its input in CPU memory where it can be; where there is no such way it is kept."""

    def of(kind: BlockKind) -> TreatmentCost:
        whole = kind.by_way.get((WHOLE, frozenset(), 1), kind.plain)
        return kind.by_way.get((WHOLE, frozenset({BOUNDARY}), 1), whole) if moves and whole is not kind.plain else whole

    return _each(costs, of)


def _moving(costs: StepCosts) -> dict[str, list[TreatmentCost]]:
    """Nothing recomputed; what each block saves waits in CPU memory."""
    return _each(costs, lambda kind: kind.by_way.get((KEPT, frozenset({SAVED}), 1), kind.plain))


def _but_for_the_last(
    costs: StepCosts, chosen: Mapping[str, Sequence[TreatmentCost]]
) -> dict[str, list[TreatmentCost]]:
    """The same, with what runs last kept: of all blocks it is recomputed while most is held."""
    run = costs.runs[-1]
    kept = [*chosen[run.stack][:-1], costs.kinds[run.kind].plain]
    return {name: kept if name == run.stack else list(blocks) for name, blocks in chosen.items()}


def _each(costs: StepCosts, of: Callable[[BlockKind], TreatmentCost]) -> dict[str, list[TreatmentCost]]:
    return {name: [of(costs.kinds[kind]) for kind in kinds] for name, kinds in costs.stacks.items()}


def _wanted(costs: StepCosts) -> Iterator[tuple[str, int, Sequence[TreatmentCost]]]:
    """Blocks of each kind for the treatments other than whole, in turns, each up to a few times: with nothing moved,
    and with ever more."""
    members: dict[str, list[tuple[str, int]]] = {}
    for stack, kinds in costs.stacks.items():
        for index, kind in enumerate(kinds):
            members.setdefault(kind, []).append((stack, index))
    for name, blocks in members.items():
        ways_of = [ways for t in SAMPLED[:-1] if (ways := _ways(costs, name, t))]
        if len(blocks) > len(ways_of):  # what keeps most would leave no room to the others; of few, plans keep some
            ways_of.sort(key=lambda ways: ways[0].kept_bytes)
        rounds = min(_MOST_A_TREATMENT, max(1, len(blocks) // (len(ways_of) + 1)))
        spread = _spread(blocks, rounds * len(ways_of))
        yield from ((*block, ways_of[place % len(ways_of)]) for place, block in enumerate(spread))


def _ways(costs: StepCosts, name: str, treatment: str) -> Sequence[TreatmentCost]:
    """Of one block under a treatment, those that copy least first, and no more than hides behind it with ease. None
    without one for what runs last."""
    kind = costs.kinds[name]
    if (treatment, frozenset(), 1) not in kind.by_way:
        return []
    able = (cost for cost in kind.treatments if (cost.treatment, cost.blocks) == (treatment, 1))
    hidden = (cost for cost in able if not cost.moves or _hides(kind, cost, costs.link))
    return sorted(hidden, key=lambda cost: (cost.copied_bytes, len(cost.moves)))


def _hides(kind: BlockKind, cost: TreatmentCost, link: LinkRates | None) -> bool:
    return (
        link is not None
        and link.out_ms(cost.copied_bytes) <= _AT_EASE * kind.forward_ms
        and link.back_ms(cost.copied_bytes) <= _AT_EASE * kind.backward_ms
    )


def _spread(blocks: Sequence[tuple[str, int]], count: int) -> Iterable[tuple[str, int]]:
    """``count`` of the blocks at most, evenly apart."""
    count = min(count, len(blocks))
    return [blocks[(2 * place + 1) * len(blocks) // (2 * count)] for place in range(count)] if count else []


def _assignment(costs: StepCosts, chosen: Mapping[str, Sequence[TreatmentCost]]) -> Assignment:
    return without_last_move(costs, {name: tuple(blocks) for name, blocks in chosen.items()})


def _fits(costs: StepCosts, chosen: Mapping[str, Sequence[TreatmentCost]], budget_bytes: int) -> bool:
    return predict_step(costs, _assignment(costs, chosen)).fits(budget_bytes, costs.host_limit_bytes)
