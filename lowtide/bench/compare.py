"""Two sets of records against each other: what got slower or larger by more than noise, and what came out otherwise."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lowtide.bench.describe import facets, mode_title, work_order, work_title
from lowtide.bench.outcome import GIB, NOT_RUN, PEAK_TOLERANCE, Outcome, outcomes, peaks_differ, seconds
from lowtide.bench.record import Record

Kind = Literal["regression", "improvement", "changed", "new", "vanished", "unjudged"]
KINDS: Mapping[Kind, str] = {
    "regression": "worse beyond noise, or a result that is none any more",
    "improvement": "better beyond noise, or a result where there was none",
    "changed": "no result in either, but for another reason",
    "unjudged": "times of a single step, which state no spread",
    "new": "only in B",
    "vanished": "only in A",
}
NOISE = (
    "Noise: a time differs where it does by more than the spread (slowest step less fastest, all runs) of A and of B; "
    f"a peak, where it does by more than {PEAK_TOLERANCE:.0%} and than what the runs of A and of B differ by."
)


@dataclass(frozen=True)
class Change:
    """What happened to one cell. what: "time", "peak" or "state"; before, after: in words, a result as s/step / GiB."""

    kind: Kind
    what: str
    work: str
    mode: str
    condition: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """changes: in the order of ``KINDS``, then by work. unchanged: how many cells are the same within noise.

    compared: cells that both A and B hold. apart: where there are none, in what all of A differs from all of B.
    """

    changes: tuple[Change, ...]
    unchanged: int
    compared: int
    apart: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        return self.of("regression")

    def of(self, kind: Kind) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Iterable[Record], b: Iterable[Record]) -> Comparison:
    """From A to B, cell by cell: the same condition on the same kind of card."""
    before, after = _by_cell(a), _by_cell(b)
    cells = sorted({**before, **after}.items(), key=lambda cell: (work_order(cell[1].condition), cell[0]))
    found: list[Change] = []
    unchanged = 0
    for key, _ in cells:
        changes = _changes(before.get(key), after.get(key))
        unchanged += not changes
        found += changes
    order = list(KINDS)
    shared = len(before.keys() & after.keys())
    apart = () if shared else tuple(_apart(before.values(), after.values()))
    return Comparison(tuple(sorted(found, key=lambda change: order.index(change.kind))), unchanged, shared, apart)


def _by_cell(records: Iterable[Record]) -> dict[tuple[str, str], Outcome]:
    return {(outcome.condition.key, outcome.card): outcome for outcome in outcomes(records)}


def _apart(a: Iterable[Outcome], b: Iterable[Outcome]) -> Iterator[str]:
    """Parts of the condition of which A and B have no value in common: ``"card: H200 in A, L40S in B"``."""
    ours, theirs = ([_parts(outcome) for outcome in side] for side in (a, b))
    for name in dict.fromkeys(name for part in (*ours, *theirs) for name in part):
        values = [list(dict.fromkeys(part.get(name, "none") for part in side)) for side in (ours, theirs)]
        if not set(values[0]) & set(values[1]):
            yield f"{name}: {_listed(values[0])} in A, {_listed(values[1])} in B"


def _parts(outcome: Outcome) -> dict[str, str]:
    condition = outcome.condition
    work = work_title(condition, outcome.on_cpu)
    return {"work": work, "mode": mode_title(condition), **facets(condition, outcome.card)}


def _listed(values: Sequence[str], most: int = 4) -> str:
    return ", ".join(values[:most]) + (f" and {len(values) - most} more" if len(values) > most else "")


def _changes(a: Outcome | None, b: Outcome | None) -> list[Change]:
    if a is None or b is None:
        vanished = [_change("vanished", "state", a, a.in_words, NOT_RUN)] if a else []
        return [*vanished, _change("new", "state", b, NOT_RUN, b.in_words)] if b else vanished
    if a.state != b.state:
        kind = "regression" if a.state == "ok" else "improvement" if b.state == "ok" else "changed"
        return [_change(kind, "state", a, a.in_words, b.in_words)]
    return [change for change in (_time_change(a, b), _peak_change(a, b)) if change] if a.state == "ok" else []


def _time_change(a: Outcome, b: Outcome) -> Change | None:
    before, after = _time(a), f"{_time(b)} ({_percent(a.step_s, b.step_s)})"
    if a.spread_s is None or b.spread_s is None:
        return _change("unjudged", "time", a, before, after)
    difference_s = b.step_s - a.step_s
    if abs(difference_s) <= max(a.spread_s, b.spread_s):
        return None
    return _change("regression" if difference_s > 0 else "improvement", "time", a, before, after)


def _peak_change(a: Outcome, b: Outcome) -> Change | None:
    difference_bytes = b.peak_bytes - a.peak_bytes
    between_runs_bytes = max(a.peak_spread_bytes, b.peak_spread_bytes)
    if not peaks_differ(a.peak_bytes, b.peak_bytes) or abs(difference_bytes) <= between_runs_bytes:
        return None
    before, after = (f"{outcome.peak_bytes / GIB:.2f} GiB" for outcome in (a, b))
    kind = "regression" if difference_bytes > 0 else "improvement"
    return _change(kind, "peak", a, before, f"{after} ({_percent(a.peak_bytes, b.peak_bytes)})")


def _change(kind: Kind, what: str, outcome: Outcome, before: str, after: str) -> Change:
    condition = outcome.condition
    where = ", ".join(facets(condition, outcome.card).values())
    work = work_title(condition, outcome.on_cpu)
    return Change(kind, what, work, mode_title(condition), where, before, after)


def _time(outcome: Outcome) -> str:
    spread = "spread unknown" if outcome.spread_s is None else f"± {outcome.spread_s:.2g}"
    return f"{seconds(outcome.step_s)} s {spread} in {outcome.steps_in_words}"


def _percent(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "from nothing"
