"""Where and with what records were made, gathered from their ``machine``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.bench.outcome import card_of
from lowtide.bench.record import Record
from lowtide.units import counted

_MOST_VALUES = 4


@dataclass(frozen=True)
class Machine:
    """One kind of card, and what was written down about the machines that it was in. facts: name → text."""

    card: str
    records: int
    facts: Mapping[str, str]

    @property
    def records_in_words(self) -> str:
        return counted(self.records, "record")


def machines(records: Iterable[Record]) -> tuple[Machine, ...]:
    """One entry a card: the values that its records name; of numbers, the range."""
    by_card: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_card.setdefault(card_of(record), []).append(record.machine)
    return tuple(Machine(card, len(found), _facts(found)) for card, found in by_card.items())


def _facts(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    values: dict[str, list[Any]] = {}
    for machine in found:
        for name, value in _flat(machine):
            values.setdefault(name, []).append(value)
    return {name: _in_words(seen) for name, seen in values.items()}


def _flat(machine: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in machine.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif isinstance(value, list | tuple):
            yield name.replace("_", " "), ", ".join(map(str, value))
        elif value is not None and name != "card":
            yield name.replace("_", " "), value


def _in_words(seen: list[Any]) -> str:
    distinct = sorted(set(seen)) if len({type(value) for value in seen}) == 1 else list(dict.fromkeys(map(str, seen)))
    if len(distinct) == 1:
        return _number(distinct[0])
    if all(isinstance(value, int | float) for value in distinct):
        return f"{_number(distinct[0])} to {_number(distinct[-1])}"
    shown = [str(value) for value in distinct]
    return ", ".join(shown) if len(shown) <= _MOST_VALUES else f"{shown[0]} to {shown[-1]} ({len(shown)})"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
