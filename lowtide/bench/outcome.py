"""What the records of one condition say together, and what noise is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from lowtide.bench.record import Condition, Figures, Record

Verdict = Literal["ok", "inert", "oom", "failed", "unsupported"]
GIB = 2**30
NOT_RUN = "not run"
CPU = "CPU"
"""Stands where a card's name does, for what was measured without one."""
FEW_STEPS = 5
"""A run with fewer counted steps says so: a median of so few is no firm figure, nor is their spread."""
PEAK_TOLERANCE = 0.01
"""Peaks have no stated spread: two of them differ if they do by more than this share."""
RESERVED_TOLD = 0.05
"""Reserved memory is told where it is more than allocated memory by more than this share."""


@dataclass(frozen=True)
class Outcome:
    """The runs of one condition on one card.

    records: those of the commit that ran last, in order. superseded: those of other commits.
    """

    condition: Condition
    card: str
    records: tuple[Record, ...]
    superseded: tuple[Record, ...] = ()

    @property
    def state(self) -> Verdict:
        """inert: an option changed nothing in a measured step. Else the best of what came out."""
        done = [record for record in self.records if record.state == "ok"]
        if not done:
            return self.records[-1].state
        return "inert" if self.inert else "ok"

    @property
    def inert(self) -> tuple[str, ...]:
        """The options that changed nothing, and why, each once."""
        done = (record for record in self.records if record.state == "ok")
        return tuple(dict.fromkeys(note for record in done for note in record.inert))

    @property
    def figures(self) -> tuple[Figures, ...]:
        """Those of every run that has some, of inert ones too."""
        return tuple(record.figures for record in self.records if record.figures is not None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why runs have no figures, each once."""
        return tuple(dict.fromkeys(record.reason for record in self.records if record.reason))

    @property
    def on_cpu(self) -> bool:
        """Offload is simulated there, and the peak is the process's memory: no measure of a card."""
        return self.card == CPU

    @property
    def step_s(self) -> float:
        return median(figures.step_s for figures in self.figures)

    @property
    def spread_s(self) -> float | None:
        """Between the fastest and the slowest step of all runs; None where there was but one step: nothing is known."""
        fastest_s, slowest_s = self.range_s
        return slowest_s - fastest_s if sum(self.steps) > 1 else None

    @property
    def range_s(self) -> tuple[float, float]:
        """The fastest and the slowest step of all runs."""
        times_s = [time_s for figures in self.figures for time_s in figures.step_times_s]
        return min(times_s), max(times_s)

    @property
    def steps(self) -> tuple[int, ...]:
        """How many were counted, run by run."""
        return tuple(len(figures.step_times_s) for figures in self.figures)

    @property
    def few_steps(self) -> bool:
        return any(steps < FEW_STEPS for steps in self.steps)

    @property
    def steps_in_words(self) -> str:
        """``"10 steps"``, ``"only 2 steps"``, of two runs ``"10 + 10 steps"``."""
        return f"{'only ' * self.few_steps}{' + '.join(map(str, self.steps))} steps"

    @property
    def range_in_words(self) -> str:
        """``"10 steps, 0.0940–0.0961 s"``: between the fastest and the slowest."""
        fastest_s, slowest_s = self.range_s
        return f"{self.steps_in_words}, {fastest_s:.4g}–{slowest_s:.4g} s"

    @property
    def peak_bytes(self) -> int:
        """Of allocated memory, the highest of the runs."""
        return max(figures.peak_allocated_bytes for figures in self.figures)

    @property
    def reserved_in_words(self) -> str:
        """``"9.20 reserved"`` (GiB, the highest of the runs) where that is much more than what was allocated."""
        reserved_bytes = max(figures.peak_reserved_bytes for figures in self.figures)
        much = reserved_bytes > (1 + RESERVED_TOLD) * self.peak_bytes
        return f"{reserved_bytes / GIB:.2f} reserved" if much else ""

    @property
    def peak_spread_bytes(self) -> int:
        """Between the runs."""
        return self.peak_bytes - min(figures.peak_allocated_bytes for figures in self.figures)

    @property
    def in_words(self) -> str:
        """``"0.09480 / 7.43"`` (s/step / GiB) for a result; else the state and why."""
        if self.state == "ok":
            return f"{seconds(self.step_s)} / {self.peak_bytes / GIB:.2f}"
        if self.state == "oom":
            return "OOM"
        why = self.inert if self.state == "inert" else self.reasons
        return f"{self.state} ({'; '.join(map(first_line, why))})" if why else self.state

    def disagreements(self) -> list[str]:
        """In what the runs differ by more than they state: states, times, peaks. Empty: they agree."""
        states = [record.state for record in self.records]
        found = [f"states: {', '.join(states)}"] if len(set(states)) > 1 else []
        pairs = list(combinations(self.figures, 2))
        if any(_times_differ(*pair) for pair in pairs):
            times = ", ".join(f"{figures.step_s:.4g} ± {figures.spread_s:.2g}" for figures in self.figures)
            found.append(f"s/step and spread: {times}")
        if any(peaks_differ(a.peak_allocated_bytes, b.peak_allocated_bytes) for a, b in pairs):
            peaks = ", ".join(f"{figures.peak_allocated_bytes / 2**30:.2f}" for figures in self.figures)
            found.append(f"peak GiB: {peaks}")
        return found


def outcomes(records: Iterable[Record]) -> list[Outcome]:
    """Records by condition and card, in the order in which the conditions first appear."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.condition.key, card_of(record)), []).append(record)
    return [_outcome(group, card) for (_, card), group in groups.items()]


def card_of(record: Record) -> str:
    """The card's name as people say it: ``"H200"``; ``"CPU"`` where there was none."""
    return (record.machine.get("card") or CPU).removeprefix("NVIDIA ")


def peaks_differ(a: float, b: float) -> bool:
    """In any unit."""
    return abs(a - b) > PEAK_TOLERANCE * min(a, b)


def seconds(step_s: float) -> str:
    return f"{step_s:#.4g}"


def first_line(text: str, most: int = 160) -> str:
    """Of a reason that may be a whole traceback's message."""
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= most else line[: most - 1] + "…"


def _outcome(group: Sequence[Record], card: str) -> Outcome:
    commit = group[-1].machine.get("commit")
    latest = tuple(record for record in group if record.machine.get("commit") == commit)
    superseded = tuple(record for record in group if record.machine.get("commit") != commit)
    return Outcome(group[-1].condition, card, latest, superseded)


def _times_differ(a: Figures, b: Figures) -> bool:
    """One step alone states no spread: nothing can be said then."""
    stated = min(len(a.step_times_s), len(b.step_times_s)) > 1
    return stated and abs(a.step_s - b.step_s) > max(a.spread_s, b.spread_s)
