"""One cell of a benchmark as a line of JSON: under which condition it ran, what came of it, on which machine."""

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

from lowtide.errors import ConfigError

State = Literal["ok", "oom", "failed", "unsupported"]
"""ok: figures are there. oom: the device's memory ran out, or a budget of it. failed: no countable step was reached.
unsupported: this model cannot run the mode at all, or nothing fits in the budget. A cell without a record was not
run."""

FORMAT = 1
"""Of the lines; a reader refuses what it does not know."""
_STRICT = ConfigDict(strict=True, extra="forbid")
_OPEN = ConfigDict(strict=True, extra="allow")
_MOST = 2**63  # no count of bytes, blocks or weights reaches it
_LONGEST = 100  # characters of a name: it becomes part of a file's
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST)]
Count = Annotated[int, Field(ge=0, lt=_MOST)]
Seconds = Annotated[FiniteFloat, Field(gt=0, lt=1e9)]


@with_config(_OPEN)
class _Note(TypedDict):
    option: str
    reason: str


@with_config(_OPEN)
class _Fallback(TypedDict):
    block: str
    reason: str


@with_config(_OPEN)
class _Plan(TypedDict):
    budget_bytes: Count
    fixed_setting: str | None
    source: str
    peak_bytes: Count
    step_ms: FiniteFloat
    stacks: dict[str, list[str]]


@with_config(_OPEN)
class _Receipt(TypedDict):
    """The parts of a receipt that a report reads; others may stand beside them."""

    blocks: NotRequired[dict[str, Count]]
    inert: NotRequired[list[_Note]]
    ignored: NotRequired[list[_Note]]
    fallbacks: NotRequired[list[_Fallback]]
    warnings: NotRequired[list[str]]
    plan: NotRequired[_Plan]


@with_config(_OPEN)
class _Machine(TypedDict):
    card: NotRequired[Annotated[str | None, Field(max_length=_LONGEST)]]
    commit: NotRequired[str | None]


@with_config(_STRICT)
@dataclass(frozen=True)
class Condition:
    """What makes a cell that cell: two records of equal conditions on one card measured the same thing.

    work: a family's key, or a synthetic shape ("16x4096"). mode: see ``bench.modes``. size: tiny is to try a benchmark
    out, on a CPU too; its figures say nothing. adapter: what is trained; rank: of its LoRA. attention: a backend's
    name, "default" for what the model uses. sizes: of the inputs, by the names of the family's row (B, H, W, FR, T …).
    depth: blocks a stack where the model was cut, empty where it is whole. vram_budget: of mode auto, in bytes, or
    "auto": what is free; None in every other mode.
    """

    kind: Literal["synthetic", "family"]
    work: Name
    mode: Name
    precision: Name = "bf16"
    size: Literal["real", "tiny"] = "real"
    adapter: Literal["frozen", "lora", "full"] = "lora"
    rank: Annotated[int, Field(ge=1, lt=_MOST)] | None = 16
    compile: Literal["off", "regional"] = "off"
    attention: Name = "default"
    sizes: Mapping[str, Count] = field(default_factory=dict)
    depth: Mapping[str, Count] = field(default_factory=dict)
    vram_budget: Annotated[int, Field(ge=1, lt=_MOST)] | Annotated[str, Field(pattern="^auto$")] | None = None

    @property
    def key(self) -> str:
        """The same text for equal conditions; of one without a budget, what it was before there were budgets."""
        fields = asdict(self)
        if self.vram_budget is None:
            del fields["vram_budget"]
        return json.dumps(fields, sort_keys=True)


@with_config(_STRICT)
@dataclass(frozen=True)
class Figures:
    """Of the steps after warm-up.

    step_s: median; step_times_s: each. peak_*_bytes: of the accelerator, over those steps; host_peak_bytes: of the
    process, over its life. first_step_s: building, attaching and the first step, pinning and compilation included.
    most_reserved_bytes: of the accelerator in mode auto, over all steps, those that it measured included; else None.
    What PyTorch gave back within a step that was measured is not in it.
    """

    step_s: Seconds
    step_times_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    warm_up_steps: Count
    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    host_peak_bytes: Count
    first_step_s: Seconds
    parameters: Count
    trainable_parameters: Count
    most_reserved_bytes: Count | None = None

    @property
    def spread_s(self) -> float:
        return max(self.step_times_s) - min(self.step_times_s)


@with_config(_STRICT)
@dataclass(frozen=True)
class Record:
    """A cell that was run.

    reason: why there are no figures. receipt: as ``Receipt.as_dict()`` gives it, the list of blocks replaced by counts
    of treatments ({"blocks": {"whole": 12, "kept": 1}}), and in mode auto with a "plan" (``bench.planned``); None where
    lowtide was not attached. machine: see ``bench.provenance``.
    """

    condition: Condition
    state: State
    machine: Annotated[Mapping[str, Any], GetPydanticSchema(lambda _, schema: schema(_Machine))]
    figures: Figures | None = None
    reason: str | None = None
    receipt: Annotated[Mapping[str, Any] | None, GetPydanticSchema(lambda _, schema: schema(_Receipt | None))] = None

    @property
    def inert(self) -> list[str]:
        """Options that changed nothing in the measured steps: such a cell is no result of its mode."""
        receipt = self.receipt or {}
        return [
            f"{note['option']}: {note['reason']}" for name in ("inert", "ignored") for note in receipt.get(name, ())
        ]

    def as_line(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})


def append(path: Path, record: Record) -> None:
    """Add a line, on its own even where an interruption cut the one before short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        cut = file.tell() > 0 and _last_byte(file) != b"\n"
        file.write((b"\n" if cut else b"") + record.as_line().encode() + b"\n")


_RECORD = TypeAdapter(Record)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, or of all ``*.jsonl`` files of a folder, in the order they were written.

    Files of other tools (``bench host`` and the like), in which no line has a format, are passed over, and so is a line
    that an interruption cut short. Raises ConfigError for a line that cannot be read, with its number and what is wrong
    in it.
    """
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        lines = file.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
        numbered = [(f"{file}:{number}", line) for number, line in enumerate(lines, start=1)]
        found = [(where, fields) for where, line in numbered for fields in _whole(line, where)]
        if any(_has_format(fields) for _, fields in found):
            yield from (_parsed(fields, where) for where, fields in found)


def _has_format(fields: Any) -> bool:
    return isinstance(fields, dict) and "format" in fields


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _whole(line: bytes, where: str) -> list[Any]:
    """What a line holds; nothing for an empty one, and for the beginning of an object that was cut short."""
    if not line.strip():
        return []
    try:
        text = line.decode()
        return [from_json(text)]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8") from error
    except ValueError as error:
        if not _is_cut(text, error):
            raise ConfigError(f"{where} is no JSON: {str(error).replace('line 1 ', '')}") from error
        return []


def _is_cut(text: str, error: ValueError) -> bool:
    """Whether text that is no JSON is the beginning of an object, so that more of it could make it whole."""
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return text.startswith("{") and "trailing characters" not in str(error)


def _parsed(fields: Any, where: str) -> Record:
    if not _has_format(fields):
        raise ConfigError(f"{where} is no benchmark record: it has no format, as the others in its file have")
    if fields.pop("format") != FORMAT:
        raise ConfigError(f"{where} is of another format than this version reads ({FORMAT})")
    try:
        record = _RECORD.validate_json(json.dumps(fields))
    except ValidationError as error:
        raise ConfigError(f"{where} is no benchmark record: {_in_a_line(error)}") from error
    if (record.state == "ok") != (record.figures is not None):
        wrong = "without figures" if record.figures is None else "with figures"
        raise ConfigError(f"{where} is no benchmark record: state {record.state} {wrong}")
    return record


def _in_a_line(error: ValidationError, most: int = 60) -> str:
    """The first fault: ``"figures.step_s: Input should be a valid number, is 'fast'"``, and how many more there are."""
    first, *others = error.errors(include_url=False, include_context=False)
    value = repr(first["input"])
    value = value if len(value) <= most else value[: most - 1] + "…"
    what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, is {value}"
    return f"{what} (and {len(others)} more)" if others else what
