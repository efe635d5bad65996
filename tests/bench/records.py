"""Hand-made records."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from lowtide import families
from lowtide.bench.describe import MODES
from lowtide.bench.record import Condition, Figures, Record, append

GIB = 2**30
MACHINE = {"card": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "commit": "abc1234", "date": "2026-11-29"}


def condition(work: str = "sd3_medium", mode: str = "layer", **more: Any) -> Condition:
    kind = "synthetic" if work[0].isdigit() else "family"
    trained = {"adapter": "frozen", "rank": None} if kind == "synthetic" else {}
    return Condition(kind, work, mode, **{**trained, **more})


def figures(step_s: float, peak_gib: float, spread_s: float = 0.0, steps: int = 5, reserved: float = 1.04) -> Figures:
    """Steps that lie evenly around ``step_s``. reserved: as a multiple of what is allocated."""
    times_s = (step_s - spread_s / 2, *[step_s] * (steps - 2), step_s + spread_s / 2) if steps > 1 else (step_s,)
    return Figures(
        step_s=step_s,
        step_times_s=times_s,
        warm_up_steps=5,
        peak_allocated_bytes=round(peak_gib * GIB),
        peak_reserved_bytes=round(peak_gib * reserved * GIB),
        host_peak_bytes=3 * GIB,
        first_step_s=9.0,
        parameters=100,
        trainable_parameters=10,
    )


def receipt(*inert: tuple[str, str], **lists: Any) -> dict[str, Any]:
    notes = [{"option": option, "reason": reason} for option, reason in inert]
    return {"blocks": {"whole": 23, "kept": 1}, "inert": notes, "ignored": [], "fallbacks": [], **lists}


def ok(
    work: str = "sd3_medium",
    mode: str = "layer",
    step_s: float = 1.0,
    peak_gib: float = 8.0,
    spread_s: float = 0.0,
    steps: int = 5,
    reserved: float = 1.04,
    receipt: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    **more: Any,
) -> Record:
    measured = figures(step_s, peak_gib, spread_s, steps, reserved)
    return Record(condition(work, mode, **more), "ok", {**MACHINE, **(machine or {})}, measured, receipt=receipt)


def bad(state: Any, mode: str, reason: str | None = None, work: str = "sd3_medium", **more: Any) -> Record:
    return Record(condition(work, mode, **more), state, MACHINE, reason=reason)


def write(folder: Path, records: Iterable[Record]) -> Path:
    """The folder, with a file of these records in it."""
    for record in records:
        append(folder / "records.jsonl", record)
    return folder


INERT = receipt(("offload_attention", "attention is recomputed"))
EVERY_STATE = [
    ok(mode="none", step_s=0.5, peak_gib=30.0),
    ok(mode="torch-checkpoint", step_s=0.8, peak_gib=8.0),
    ok(mode="layer", step_s=0.75, peak_gib=8.0, receipt=receipt()),
    ok(mode="layer-offload", step_s=0.1, peak_gib=1.0, receipt=INERT),
    bad("oom", "interval2", "CUDA out of memory"),
    bad("failed", "auto", "RuntimeError: a | b <c>\nTraceback of many lines"),
    bad("unsupported", "selective", "no softmax attention"),
]


def many() -> Iterator[Record]:
    """As much as a whole sweep makes: every family in 4 modes, 10 of them in all modes, and 4 synthetic shapes with 3
    kinds of training and 2 compile settings in all modes; times and peaks drawn at random, the same each time."""
    drawn = Random(0)
    keys = [row.key for row in families.all_families()]
    own = [mode for mode in MODES if mode != "diffusers"]
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        *((key, mode, {}) for key in keys for mode in ("none", "layer", "unsloth", "selective")),
        *((key, mode, {"sizes": {"B": 64}}) for key in keys[:10] for mode in MODES),
        *(
            (shape, mode, {"adapter": adapter, "rank": 16 if adapter == "lora" else None, "compile": how})
            for shape in ("16x1024", "16x4096", "16x16384", "32x4096")
            for adapter in ("frozen", "lora", "full")
            for how in ("off", "regional")
            for mode in own
        ),
    ]
    for work, mode, more in wanted:
        share = 1.0 if mode == "none" else drawn.uniform(0.3, 1.0)
        step_s = 0.9 * (1.0 + (1.0 - share) * drawn.uniform(0.1, 0.7))
        yield ok(work, mode, step_s, 30 * share, spread_s=0.02, steps=10, receipt=receipt(), **more)
