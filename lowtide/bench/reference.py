"""Public figures to hold ours against: what others published for the same work, mode and precision, by card.

They lie in ``data/reference_*.json``, which name their source. Modes there are translated to ours; what was not run
is left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from lowtide import families
from lowtide.bench.describe import compile_in_words, sizes_of, trained_in_words
from lowtide.bench.record import Condition

_SAME_PEAK = 0.001  # published peaks are rounded to 0.01 GiB
_PLAIN_MODES = ("none", "layer", "interval2")  # in the order in which a schedule that did not act falls back to them


@dataclass(frozen=True)
class Reference:
    """One published cell, on one card.

    state: ok, or what was published instead of figures: OOM, failed, unsupported. x_none: its time as a multiple of
    mode none's, where both are known. same_peak_as: another mode that was published with the same peak: an option
    that did not act, perhaps.
    """

    card: str
    state: str
    step_s: float | None = None
    peak_gib: float | None = None
    x_none: float | None = None
    same_peak_as: str | None = None

    @property
    def in_words(self) -> str:
        """``"H100 0.721 / 7.67 (1.36 × none)"``, ``"L40S OOM"``."""
        if self.step_s is None or self.peak_gib is None:
            return f"{self.card} {self.state}"
        more = [f"{self.x_none:.2f} × none"] if self.x_none else []
        more += [f"same peak as {self.same_peak_as}"] if self.same_peak_as else []
        figures = f"{self.card} {self.step_s:g} / {self.peak_gib:.2f}"
        return f"{figures} ({', '.join(more)})" if more else figures


@dataclass(frozen=True)
class Published:
    """What is published about one work.

    setting: what was measured, as far as it is known: batch, pixels (width, height), frames, adapter, rank, compile,
    attention. cells: precision, mode, card → [s, GiB], or a state. remarks: what a reader has to know.
    """

    title: str
    setting: Mapping[str, Any]
    remarks: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]]


def source(kind: str) -> str:
    """Who published the figures for works of this kind (``Condition.kind``), and what a cell is."""
    data = _data(kind)
    return f"{data['source']}: {data['cell']}"


def incomparable(condition: Condition) -> str:
    """Why no public figure is one of this condition's model: it is tiny, or truncated. Empty: it is the real one."""
    return "tiny model" if condition.size == "tiny" else "truncated" if condition.depth else ""


def published(condition: Condition) -> Published | None:
    """What is published about a condition's work, whatever its mode, or None: of the whole, real model alone."""
    if incomparable(condition):
        return None
    entry = _data(condition.kind)["works"].get(_key(condition))
    return Published(**{**entry, "remarks": tuple(entry["remarks"])}) if entry else None


def references(condition: Condition) -> tuple[Reference, ...]:
    """The published figures for a condition's work, mode and precision, one a card; empty: there are none.

    The sizes, the adapter and what else was measured may differ: see ``differences``. A synthetic work is published
    with frozen weights only; there, another adapter is another work.
    """
    work = published(condition)
    if work is None or (condition.kind == "synthetic" and condition.adapter != work.setting["adapter"]):
        return ()
    modes = work.cells.get(condition.precision, {})
    return tuple(_reference(modes, condition.mode, card) for card in modes.get(condition.mode, ()))


def differences(condition: Condition) -> list[str]:
    """In what a condition differs from the published one of its work: ``"batch 3 there"``."""
    work = published(condition)
    return list(_differences(work.setting, condition)) if work else []


@cache
def _data(kind: str) -> dict[str, Any]:
    path = files("lowtide.bench") / "data" / f"reference_{kind}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _key(condition: Condition) -> str:
    known = condition.kind == "family" and families.known(condition.work)
    return families.find(condition.work).key if known else condition.work


def _reference(modes: Mapping[str, Mapping[str, Any]], mode: str, card: str) -> Reference:
    cell = modes[mode][card]
    if isinstance(cell, str):
        return Reference(card, cell)
    step_s, peak_gib = cell
    none_s, _ = _figures(modes, "none", card)
    x_none = step_s / none_s if none_s and mode != "none" else None
    return Reference(card, "ok", step_s, peak_gib, x_none, _same_peak(modes, mode, card))


def _same_peak(modes: Mapping[str, Mapping[str, Any]], mode: str, card: str) -> str | None:
    _, peak_gib = _figures(modes, mode, card)
    before = _PLAIN_MODES[: _PLAIN_MODES.index(mode)] if mode in _PLAIN_MODES else _PLAIN_MODES
    for other in before:
        _, other_gib = _figures(modes, other, card)
        if peak_gib and other_gib and abs(peak_gib - other_gib) <= _SAME_PEAK * other_gib:
            return other
    return None


def _figures(modes: Mapping[str, Mapping[str, Any]], mode: str, card: str) -> tuple[float | None, float | None]:
    cell = modes.get(mode, {}).get(card)
    return (cell[0], cell[1]) if isinstance(cell, list) else (None, None)


def _differences(there: Mapping[str, Any], here: Condition) -> Iterator[str]:
    sizes = sizes_of(here)
    if "batch" in there and sizes.get("B", 1) != there["batch"]:
        yield f"batch {there['batch']} there"
    if "pixels" in there and "H" in sizes:
        width, height = there["pixels"]
        if width * height != sizes["H"] * sizes["W"]:
            yield f"{width}×{height} pixels there"
    if "frames" in there and sizes.get("FR", 1) != there["frames"]:
        yield f"{there['frames']} frames there"
    if (there.get("adapter"), there.get("rank")) != (here.adapter, here.rank if here.adapter == "lora" else None):
        yield f"{trained_in_words(there['adapter'], there.get('rank'))} there"
    if "compile" in there and there["compile"] != here.compile:
        yield f"{compile_in_words(there['compile'])} there"
    elif "compile" not in there and here.compile != "off":
        yield "compile setting not published"
    if "attention" in there and there["attention"] != here.attention:
        yield f"{there['attention']} attention there"
