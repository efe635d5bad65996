"""What ``auto`` planned, as a cell's record keeps it and as a report tells it beside what was measured."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lowtide.bench.outcome import GIB, seconds
from lowtide.bench.record import Figures
from lowtide.plan.answer import Plan
from lowtide.plan.explain import as_dict, places_by_treatment


def planned(plan: Plan, budget_bytes: int) -> dict[str, Any]:
    """The plan as plain data. peak_bytes, step_ms: predicted before it ran, the latter without the optimizer's update.
    room_bytes: of the budget, less what PyTorch reserves and no tensor takes. stacks: each in words, ``"0–3, 8:
    recomputed whole"``.
    """
    facts = as_dict(plan if plan.foreseen is None else replace(plan, prediction=plan.foreseen))
    return {
        "budget_bytes": budget_bytes,
        "room_bytes": facts["budget_bytes"],
        "fixed_setting": facts["fixed_setting"],
        "source": facts["source"],
        "peak_bytes": facts["predicted"]["peak_bytes"],
        "step_ms": facts["predicted"]["step_ms"],
        "stacks": {
            name: [f"{', '.join(places)}: {what}" for what, places in places_by_treatment(lines).items()]
            for name, lines in facts["stacks"].items()
        },
    }


def in_words(plan: Mapping[str, Any], figures: Figures) -> Iterator[str]:
    """Predicted and measured side by side, then what runs."""
    setting = plan["fixed_setting"] or "a schedule of its own"
    predicted = f"{seconds(plan['step_ms'] / 1000)} s / {_gib(plan['peak_bytes'])} GiB"
    measured = f"{seconds(figures.step_s)} s / {_gib(figures.peak_allocated_bytes)} GiB"
    yield f"{setting} ({plan['source']}): predicted {predicted}, measured {measured}"
    if figures.most_reserved_bytes is not None:
        reserved, budget = _gib(figures.most_reserved_bytes), _gib(plan["budget_bytes"])
        yield f"reserved over all steps: at most {reserved} of {budget} GiB"
    yield from (f"{stack} {words}" for stack, lines in plan["stacks"].items() for words in lines)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"
