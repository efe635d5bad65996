"""One cell of a benchmark as a line of JSON: under which condition it ran, what came of it, on which machine."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lowtide.errors import ConfigError

State = Literal["ok", "oom", "failed", "unsupported"]
"""ok: figures are there. oom: the device's memory ran out, or a budget of it. failed: no countable step was reached.
unsupported: this model cannot run the mode at all, or nothing fits in the budget. A cell without a record was not
run."""

FORMAT = 1
"""Of the lines; a reader refuses what it does not know."""


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
    work: str
    mode: str
    precision: str = "bf16"
    size: Literal["real", "tiny"] = "real"
    adapter: Literal["frozen", "lora", "full"] = "lora"
    rank: int | None = 16
    compile: Literal["off", "regional"] = "off"
    attention: str = "default"
    sizes: Mapping[str, int] = field(default_factory=dict)
    depth: Mapping[str, int] = field(default_factory=dict)
    vram_budget: int | str | None = None

    @property
    def key(self) -> str:
        """The same text for equal conditions; of one without a budget, what it was before there were budgets."""
        fields = asdict(self)
        if self.vram_budget is None:
            del fields["vram_budget"]
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class Figures:
    """Of the steps after warm-up.

    step_s: median; step_times_s: each. peak_*_bytes: of the accelerator, over those steps; host_peak_bytes: of the
    process, over its life. first_step_s: building, attaching and the first step, pinning and compilation included.
    most_reserved_bytes: of the accelerator in mode auto, over all steps, those that it measured included; else None.
    What PyTorch gave back within a step that was measured is not in it.
    """

    step_s: float
    step_times_s: tuple[float, ...]
    warm_up_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_peak_bytes: int
    first_step_s: float
    parameters: int
    trainable_parameters: int
    most_reserved_bytes: int | None = None

    @property
    def spread_s(self) -> float:
        return max(self.step_times_s) - min(self.step_times_s)


@dataclass(frozen=True)
class Record:
    """A cell that was run.

    reason: why there are no figures. receipt: as ``Receipt.as_dict()`` gives it, the list of blocks replaced by counts
    of treatments ({"blocks": {"whole": 12, "kept": 1}}), and in mode auto with a "plan" (``bench.planned``); None where
    lowtide was not attached. machine: see ``bench.provenance``.
    """

    condition: Condition
    state: State
    machine: Mapping[str, Any]
    figures: Figures | None = None
    reason: str | None = None
    receipt: Mapping[str, Any] | None = None

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


def read(path: Path) -> Iterator[Record]:
    """The records of a file, or of all ``*.jsonl`` files of a folder, in the order they were written.

    Lines of other tools (``bench host`` and the like) are passed over, and so is one that an interruption cut short.
    Raises ConfigError for a record that cannot be read.
    """
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            fields = _whole(line)
            if fields is not None and "format" in fields:
                yield _parsed(fields, f"{file}:{number}")


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _whole(line: str) -> dict[str, Any] | None:
    """The object of a line; None for one that was cut short."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _parsed(fields: dict[str, Any], where: str) -> Record:
    try:
        if fields.pop("format") != FORMAT:
            raise ConfigError(f"{where} is of another format than this version reads ({FORMAT})")
        figures = fields["figures"]
        if figures is not None:
            figures = Figures(**{**figures, "step_times_s": tuple(figures["step_times_s"])})
        return Record(**{**fields, "condition": Condition(**fields["condition"]), "figures": figures})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no benchmark record: {error}") from error
