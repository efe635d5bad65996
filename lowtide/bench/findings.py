"""What comes out of a report, in a few sentences: the fastest modes in half of none's memory, and what modes cost.

Of real sizes on cards alone. Each kind of work by itself, each condition once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from lowtide.bench.outcome import Outcome
from lowtide.bench.report import Report

SHARE = 0.5
"""Of none's peak."""
_COSTS = ("layer", "selective", "unsloth")
_KINDS = {"synthetic": "Synthetic blocks", "family": "Families"}
Results = Mapping[str, Outcome]


def findings(report: Report) -> Iterator[str]:
    """Sentences, the fewer the less there is; none where no condition has figures of mode none and of another."""
    for kind, title in _KINDS.items():
        found = list(_results(report, kind))
        if found:
            yield f"{title}: {_fastest(found)}"
            yield from (f"{title}: {sentence}" for mode in _COSTS for sentence in _cost(found, mode))


def _results(report: Report, kind: str) -> Iterator[Results]:
    """The results of each condition by mode, where there are some of none and of another mode."""
    for matrix in report.matrices:
        if matrix.condition.kind == kind and matrix.condition.size == "real" and not matrix.on_cpu:
            for column in matrix.columns:
                results = {cell.mode: cell.result for cell in column.cells if cell.result}
                if "none" in results and len(results) > 1:
                    yield results


def _fastest(found: Sequence[Results]) -> str:
    """``"of 9 conditions, 8 have a mode within 50% of none's peak; the fastest is ffn in 5, layer in 3."``"""
    counts = Counter(mode for results in found if (mode := _fastest_mode(results)))
    words = ", ".join(f"{mode} in {count}" for mode, count in counts.most_common())
    within = f"of {_conditions(len(found))}, {counts.total() or 'none'} have a mode within {SHARE:.0%} of none's peak"
    return f"{within}; the fastest is {words}." if words else f"{within}."


def _fastest_mode(results: Results) -> str | None:
    most_bytes = SHARE * results["none"].peak_bytes
    fit = {mode: outcome.step_s for mode, outcome in results.items() if outcome.peak_bytes <= most_bytes}
    return min((mode for mode in fit if mode != "none"), key=fit.__getitem__, default=None)


def _cost(found: Sequence[Results], mode: str) -> Iterator[str]:
    """``"layer takes 1.31 × none's time and 0.42 × its peak (medians of 9 conditions)."``"""
    pairs = [(results[mode], results["none"]) for results in found if mode in results and results["none"].peak_bytes]
    if pairs:
        time = median(ours.step_s / none.step_s for ours, none in pairs)
        peak = median(ours.peak_bytes / none.peak_bytes for ours, none in pairs)
        of = f"medians of {_conditions(len(pairs))}" if len(pairs) > 1 else "1 condition"
        yield f"{mode} takes {time:.2f} × none's time and {peak:.2f} × its peak ({of})."


def _conditions(count: int) -> str:
    return f"{count} condition{'s' * (count != 1)}"
