"""A plan as a file: versioned JSON. What is read back holds a Schedule that ``attach(schedule=…)`` takes."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from lowtide.errors import ConfigError, MachineError
from lowtide.plan.answer import Alternative, Plan
from lowtide.plan.predict_step import Position, StepPrediction
from lowtide.plan.schedule import Schedule, StackSchedule, mixed

FORMAT, VERSION = "lowtide plan", 1
_FILE = {"format", "version", "conditions", "plan"}

Record = TypeVar("Record", Position, StepPrediction, Alternative, Plan)


@dataclass(frozen=True)
class SavedPlan:
    """conditions: what the plan is for, as text: model, sizes, card, what is trained …"""

    plan: Plan
    conditions: dict[str, str]

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule


def save_plan(path: str | Path, plan: Plan | None, conditions: dict[str, str] | None = None) -> None:
    """Write a plan. Raises ConfigError for None, the ``plan`` of a handle that has none; MachineError where the file
    cannot be written."""
    if plan is None:
        raise ConfigError(
            f"there is no plan to be written to {path}: under `auto` the handle has one from the first forward on, and "
            "`handle.settled` says when it stays; where a backend was chosen by name there is none"
        )
    try:
        Path(path).write_text(dumps(plan, conditions) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"the plan could not be written to {path}: {error.strerror}") from error


def check_place(path: str | Path) -> None:
    """Raises MachineError where ``save_plan`` could not write that file now: to be asked before a plan is made."""
    place = Path(path)
    why = (
        "its folder does not exist" if not place.parent.is_dir()
        else "it is a folder" if place.is_dir()
        else None if os.access(place if place.exists() else place.parent, os.W_OK)
        else "that is not permitted"
    )  # fmt: skip
    if why is not None:
        raise MachineError(f"the plan cannot be written to {path}: {why}")


def load_plan(path: str | Path) -> SavedPlan:
    """Read a plan. Raises ConfigError where there is none, or one that this version cannot read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no plan can be read from {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"no plan can be read from {path}: {why}") from error
    return loads(text, str(path))


def dumps(plan: Plan, conditions: dict[str, str] | None = None) -> str:
    data = {"format": FORMAT, "version": VERSION, "conditions": conditions or {}, "plan": asdict(plan)}
    data["plan"]["schedule"] = _schedule_dict(plan.schedule)
    return json.dumps(data, indent=1)


def loads(text: str, where: str = "the plan") -> SavedPlan:
    """where: how to name the file to people."""
    try:
        data = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error.msg} in line {error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{where} is not a saved plan: `format` must be {FORMAT!r}")
    if type(data.get("version")) is not int or data["version"] != VERSION:  # true is no number
        raise ConfigError(
            f"{where} is a plan of version {data.get('version')!r}, and this lowtide reads version {VERSION}. "
            "Make the plan again with `lowtide plan`"
        )
    reader = _Reader(where)
    reader.check_keys(data, _FILE, "")
    conditions = reader.of_type(data["conditions"], dict, "conditions")
    for name, value in conditions.items():
        reader.of_type(value, str, f"conditions.{name}")
    return SavedPlan(reader.plan(data["plan"]), conditions)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no figure that a plan can have")


def _schedule_dict(schedule: Schedule) -> dict[str, Any]:
    """Blocks as ``mixed`` writes them, and the segments that they form."""
    stacks = {
        name: {"blocks": list(stack.words), "segments": list(stack.segments)} for name, stack in schedule.stacks.items()
    }
    return {**asdict(schedule), "stacks": stacks}


class _Reader:
    """Checks and builds what a file says; errors name the file and the field."""

    def __init__(self, where: str) -> None:
        self._where = where

    def plan(self, data: Any) -> Plan:
        data = dict(self.of_type(data, dict, "plan"))
        self.check_keys(data, {field.name for field in fields(Plan)}, "plan.")
        data["schedule"] = self._schedule(data["schedule"])
        data["prediction"] = self._prediction(data["prediction"])
        others = self.of_type(data["alternatives"], list, "plan.alternatives")
        data["alternatives"] = tuple(
            self._record(Alternative, other, f"plan.alternatives[{number}]") for number, other in enumerate(others)
        )
        return self._record(Plan, data, "plan")

    def _prediction(self, data: Any) -> StepPrediction:
        data = dict(self.of_type(data, dict, "plan.prediction"))
        positions = self.of_type(data.get("positions"), list, "plan.prediction.positions")
        data["positions"] = tuple(
            self._record(Position, position, f"plan.prediction.positions[{number}]")
            for number, position in enumerate(positions)
        )
        if not positions:
            raise self._error("plan.prediction.positions", "is empty")
        return self._record(StepPrediction, data, "plan.prediction")

    def _schedule(self, data: Any) -> Schedule:
        data = self.of_type(data, dict, "plan.schedule")
        self.check_keys(data, {field.name for field in fields(Schedule)}, "plan.schedule.")
        stacks = self.of_type(data["stacks"], dict, "plan.schedule.stacks")
        if not stacks:
            raise self._error("plan.schedule.stacks", "is empty")
        built = {name: self._stack(stack, f"plan.schedule.stacks.{name}") for name, stack in stacks.items()}
        return Schedule(built, data["in_flight_bytes"], data["prefetch_bytes"])

    def _stack(self, data: Any, field: str) -> StackSchedule:
        data = self.of_type(data, dict, field)
        self.check_keys(data, {"blocks", "segments"}, f"{field}.")
        segments = self.of_type(data["segments"], list, f"{field}.segments")
        for number in segments:
            self.of_type(number, int | None, f"{field}.segments")
        self._check_together(segments, f"{field}.segments")
        try:
            return replace(mixed(self.of_type(data["blocks"], list, f"{field}.blocks")), segments=tuple(segments))
        except ValueError as error:
            raise self._error(field, f"is no schedule: {error}") from error

    def _check_together(self, segments: Sequence[int | None], field: str) -> None:
        """The blocks of a segment are neighbours."""
        last: dict[int, int] = {}
        for block, number in enumerate(segments):
            if number is not None:
                if last.get(number, block - 1) != block - 1:
                    raise self._error(
                        field, f"is no schedule: block {block} is in segment {number}, as block {last[number]} is, and "
                        f"block {block - 1} between them is not"
                    )  # fmt: skip
                last[number] = block

    def _record(self, kind: type[Record], data: Any, name: str) -> Record:
        data = self.of_type(data, dict, name)
        self.check_keys(data, {field.name for field in fields(kind)}, f"{name}.")
        for field in fields(kind):
            if field.type in _TYPES:
                self.of_type(data[field.name], _TYPES[field.type], f"{name}.{field.name}")
        return kind(**data)

    def check_keys(self, data: dict[str, Any], wanted: set[str], prefix: str) -> None:
        for key in sorted(wanted - data.keys()):
            raise self._error(prefix + key, "is missing")
        for key in sorted(data.keys() - wanted):
            raise self._error(prefix + key, "is unknown")

    def of_type(self, value: Any, kind: Any, field: str) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._error(field, f"must be {_NAMES.get(kind, kind)}, not {value!r:.60}")
        return value

    def _error(self, field: str, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: {field} {what}")


_TYPES = {int: int, float: float | int, str: str, str | None: str | None, int | None: int | None}
"""Of a field of a record, what JSON may have there."""
_NAMES = {
    int: "a whole number",
    float | int: "a number",
    str: "text",
    str | None: "text or null",
    int | None: "a whole number or null",
    list: "a list",
    dict: "an object",
}
