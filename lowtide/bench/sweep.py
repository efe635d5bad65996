"""A list of cells, one after another: what was measured before on this kind of card is skipped, the rest appended."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide import families
from lowtide.bench import record as records
from lowtide.bench.record import Condition, Record
from lowtide.bench.works import LARGEST_WHOLE, depth_of
from lowtide.keys import AUTO

SYNTHETIC = ("16x1024", "16x4096", "16x16384", "32x4096")
"""Blocks x tokens of the public synthetic sweep."""
_FINISHED = ("ok", "oom", "unsupported")
Budgets = Sequence[int | str | None]


@dataclass(frozen=True)
class Progress:
    """Told before each cell and after it. number: of the cell, from 0; record: once it has one."""

    number: int
    total: int
    condition: Condition
    record: Record | None = None


def synthetic_conditions(
    works: Sequence[str],
    modes: Sequence[str],
    adapters: Sequence[str],
    rank: int,
    budgets: Budgets = (None,),
    **common: Any,
) -> Iterator[Condition]:
    """Every work with every kind of training and every mode. rank: where it is a LoRA. budgets: of mode auto, a
    condition each. common: the other fields of ``Condition``."""
    for work, adapter, setting in itertools.product(works, adapters, _settings(modes, budgets)):
        if setting["mode"] != "diffusers":
            own = {"adapter": adapter, "rank": rank if adapter == "lora" else None}
            yield Condition("synthetic", work, **setting, **own, **common)


def family_conditions(
    names: Sequence[str],
    modes: Sequence[str],
    sizes: Mapping[str, int],
    most_parameters: int = LARGEST_WHOLE,
    budgets: Budgets = (None,),
    **common: Any,
) -> Iterator[Condition]:
    """Every family in every mode, at its row's sizes except for ``sizes``; large ones are cut (``works.depth_of``).

    budgets: of mode auto, a condition each. Raises ConfigError for a name that is unknown.
    """
    for name in names:
        row = families.find(name)
        tiny = common.get("size") == "tiny"
        usual = (row.tiny if tiny else row.real).vars
        depth = {} if tiny else depth_of(row, most_parameters)
        base = Condition("family", row.key, "none", sizes={**usual, **sizes}, depth=depth, **common)
        yield from (replace(base, **setting) for setting in _settings(modes, budgets))


def sweep(
    conditions: Iterable[Condition],
    run: Callable[[Condition], Record],
    out: Path,
    card: str | None,
    tell: Callable[[Progress], None],
    again: bool = False,
) -> list[Record]:
    """Run what is not finished and append each record to ``out`` as soon as it is there. again: run all.

    Finished is what has figures, ran out of memory or is unsupported, on a card of this name; what failed runs again.
    """
    done = set() if again else finished(out, card)
    todo = [condition for condition in _distinct(conditions) if condition.key not in done]
    made = []
    for number, condition in enumerate(todo):
        tell(Progress(number, len(todo), condition))
        made.append(run(condition))
        records.append(out, made[-1])
        tell(Progress(number, len(todo), condition, made[-1]))
    return made


def finished(out: Path, card: str | None) -> set[str]:
    """Keys of the conditions that need no further run on this card."""
    if not out.exists():
        return set()
    return {
        record.condition.key
        for record in records.read(out)
        if record.state in _FINISHED and record.machine.get("card") == card
    }


def _settings(modes: Sequence[str], budgets: Budgets) -> list[dict[str, Any]]:
    return [
        {"mode": mode, "vram_budget": budget} for mode in modes for budget in (budgets if mode == AUTO else (None,))
    ]


def _distinct(conditions: Iterable[Condition]) -> list[Condition]:
    return list({condition.key: condition for condition in conditions}.values())
