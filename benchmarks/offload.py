"""Offload on a CUDA card: ms a step and peak GiB of every way of offloading and recomputing, beside torch's checkpoint.

Works: see works.py (synthetic blocks; Wan 2.1 1.3B, SD3 medium, Flux.1 and SDXL with random weights and a LoRA). Modes:
see offload_modes.py; mixed schedules are lines of text there, and more come with --mixed.

Every mode is visited --rounds times, in turns, the turns in reverse order every other round, so that a drift of the
card's clock falls on all; ``none`` and torch's checkpoint once more at the end. A visit attaches, makes two steps that
are not timed (lowtide counts bytes and times copies in them) and --steps timed ones, which follow each other without
the host waiting for the card. CPU memory is pinned once for all visits, in the first step of a mode ("first s").
Medians over all timed steps; "x none" and "x torch" are ratios of medians of this run, torch being torch's own
checkpoint around each block; peak: of allocated memory over the timed steps. "Δ grad" is the largest difference of a
gradient from the first step of ``none``, relative to the gradient's largest element; ``none``'s own line says what
plain runs differ by.

Run: python benchmarks/offload.py [--work 16x4096 wan] [--modes none 'unsloth*'] [--save]
     python benchmarks/offload.py --work wan --modes none torch-checkpoint \\
         --mixed wan '2*ffn+boundary+saved, selective+boundary+attention; tail=2; prefetch=512'
"""

import argparse
import gc
import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from offload_modes import MIXED, MODES, Enter, by_schedule
from pinned_cache import pinned_once
from torch.nn.attention import sdpa_kernel
from visits import GIB, Row, Visitor
from works import WORKS, Work

from lowtide.bench.provenance import link_gb_per_s, provenance

RESULTS = Path(__file__).parent / "results" / "offload.jsonl"
NOT_BY_DEFAULT = ("sdxl",)
AGAIN = ("torch-checkpoint", "none")
"""Visited once more at the end: every ratio is taken to them, and they cost no pinned memory."""
GOALS: dict[str, tuple[tuple[str, float, float], ...]] = {
    "16x16384": (("*", 1.05, 5.7), ("attention-offload", 1.005, 12.8)),
    "16x4096": (("*", 1.18, 4.3),),
    "wan": (("*", 1.12, 9.0),),
    "sd3": (("*", 1.22, 6.2),),
    "flux": (("*", 1.22, 24.6),),
}
"""(modes, times none, peak GiB) to be reached by one of the modes."""
UNSLOTH_GOAL = 1.01


def modes_of(name: str, patterns: list[str] | None, extra: list[str]) -> dict[str, Enter]:
    """The modes of a work whose names fit a pattern, ``none`` first; all its mixed schedules count as "mixed"."""
    mixed = {text: by_schedule(text) for text in MIXED.get(name, ())}
    wanted = patterns or ["*"]
    chosen = {mode: enter for mode, enter in MODES.items() if any(fnmatch(mode, pattern) for pattern in wanted)}
    if patterns is None or "mixed" in patterns:
        chosen |= mixed
    return {"none": MODES["none"], **chosen, **{text: by_schedule(text) for text in extra}}


def measure(work: Work, modes: Mapping[str, Enter], options: argparse.Namespace, name: str) -> dict[str, Row]:
    task = work.build(options.device, options.device == "cpu")
    visitor = Visitor(task, options.device, options.trace / name if options.trace else None)
    rows = {mode: Row() for mode in modes}
    rounds, steps = options.rounds or work.rounds, options.steps or work.steps
    for number in range(rounds):
        for mode in list(modes) if number % 2 == 0 else reversed(list(modes)):
            if rows[mode].error is None:
                visitor.visit(mode, modes[mode], rows[mode], steps)
    for mode in AGAIN:
        if mode in rows and rows[mode].error is None:
            visitor.visit(mode, modes[mode], rows[mode], steps)
    return rows


def figures(row: Row, plain: Row, by_torch: Row | None) -> dict[str, Any]:
    """What a row says, as data."""
    if row.error is not None or not row.times_ms:
        return {"error": row.error or "not run"}
    has_torch = by_torch is not None and by_torch.times_ms
    return {
        "ms": row.ms,
        "spread_ms": max(row.times_ms) - min(row.times_ms),
        "steps": len(row.times_ms),
        "x_none": row.ms / plain.ms if plain.times_ms else None,
        "x_torch": row.ms / by_torch.ms if has_torch and by_torch else None,
        "peak_gib": row.peak_gib,
        "host_ms": statistics.median(row.host_ms),
        "gradient_difference": row.gradient_difference,
        "first_step_s": row.enter_s,
        "totals": row.totals,
        "notes": row.notes,
    }


_COLUMNS = (
    f"{'ms':>8} {'x none':>7} {'x torch':>7} {'peak':>6} {'kept':>6} {'moved':>6} {'pinned':>6} {'hidden':>7} "
    f"{'exposed':>7} {'misses':>6} {'again':>5} {'host ms':>8} {'first s':>7} {'Δ grad':>8}"
)


def lines(shown: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The table: GiB of peak, kept by receipt, moved to CPU memory, pinned; ms of copies hidden and exposed."""
    yield f"{_COLUMNS}  mode"
    for mode, row in shown.items():
        if "error" in row:
            yield f"{row['error'][:100]:>{len(_COLUMNS)}}  {mode}"
            continue
        totals = row["totals"]
        pool = totals.get("pool") or {}
        yield (
            f"{row['ms']:8.1f} {_ratio(row['x_none'])} {_ratio(row['x_torch'])} {row['peak_gib']:6.2f} "
            f"{totals.get('kept_bytes', 0) / GIB:6.2f} {totals.get('d2h_bytes', 0) / GIB:6.2f} "
            f"{pool.get('pinned_bytes', 0) / GIB:6.2f} {totals.get('hidden_copy_ms', 0):7.1f} "
            f"{totals.get('exposed_copy_ms', 0):7.1f} {totals.get('prefetch_misses', 0):6} "
            f"{totals.get('recompute_calls', 0):5} {row['host_ms']:8.1f} {row['first_step_s']:7.1f} "
            f"{row['gradient_difference']:8.1e}  {mode}"
        )
        if pool.get("fallbacks"):
            yield f"    ! {pool['fallbacks']} buffers are not pinned: {pool['pageable_bytes'] / GIB:.2f} GiB"
        yield from (f"    ! {note}" for note in row["notes"])


def _ratio(value: float | None) -> str:
    return f"{value:7.3f}" if value is not None else f"{'':7}"


def verdicts(name: str, shown: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Each goal of this work: reached by which mode, or how near the nearest came."""
    measured = {mode: row for mode, row in shown.items() if "error" not in row}
    for pattern, ratio, peak_gib in GOALS.get(name, ()):
        rows = {mode: row for mode, row in measured.items() if fnmatch(mode, pattern) and mode != "none"}
        if not rows:
            continue
        # how far the worse of the two figures is over its limit
        over = {mode: max(row["x_none"] / ratio, row["peak_gib"] / peak_gib) for mode, row in rows.items()}
        best = min(over, key=lambda mode: over[mode])
        said = "reached" if over[best] <= 1 else "MISSED, nearest"
        figures = f"{rows[best]['x_none']:.3f} x none at {rows[best]['peak_gib']:.2f} GiB"
        yield f"goal {pattern} <= {ratio} x none at <= {peak_gib} GiB: {said}: {figures} by {best}"
    unsloth = measured.get("unsloth", {}).get("x_torch")
    if unsloth is not None:
        said = "reached" if unsloth <= UNSLOTH_GOAL else "MISSED"
        yield f"goal unsloth <= {UNSLOTH_GOAL} x torch's checkpoint: {said}: {unsloth:.3f}"


def fill_host_memory(gib: int) -> None:
    """Touch so much CPU memory and give it back: virtual machines that grow with use then show what they have."""
    blocks = [torch.ones(GIB, dtype=torch.uint8) for _ in range(gib)]
    del blocks
    print(Path("/proc/meminfo").read_text().partition("\n")[0], f"after {gib} GiB were filled")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, help=f"default: all but {', '.join(NOT_BY_DEFAULT)}")
    parser.add_argument("--modes", nargs="+", help="patterns of names; 'mixed' stands for the listed mixed schedules")
    parser.add_argument("--mixed", nargs=2, action="append", default=[], metavar=("WORK", "SCHEDULE"))
    parser.add_argument("--rounds", type=int, help="visits of each mode (default: by work)")
    parser.add_argument("--steps", type=int, help="timed steps in a visit (default: by work)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to try the script")
    parser.add_argument("--trace", type=Path, help="folder for a profiler's trace of one step of each visit")
    parser.add_argument("--fill-host-gib", type=int, default=0, help="fill so much CPU memory first, see the function")
    parser.add_argument("--save", nargs="?", const=RESULTS, type=Path, help=f"append results (default {RESULTS.name})")
    parser.add_argument("--commit", help="commit of the tree, where git is not there to say it")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    if options.fill_host_gib:
        fill_host_memory(options.fill_host_gib)
    facts = provenance(options.device, options.commit)
    rates = link_gb_per_s() if options.device == "cuda" else {}
    print(facts, rates)
    for name in options.work or [name for name in WORKS if name not in NOT_BY_DEFAULT]:
        work = WORKS[name]
        modes = modes_of(name, options.modes, [text for of, text in options.mixed if of == name])
        with pinned_once(), sdpa_kernel(list(work.kernels)) if options.device == "cuda" else nullcontext():
            rows = measure(work, modes, options, name)
        shown = {mode: figures(row, rows["none"], rows.get("torch-checkpoint")) for mode, row in rows.items()}
        print(f"\n{name}: {work.title}", *lines(shown), *verdicts(name, shown), sep="\n", flush=True)
        if options.save:
            options.save.parent.mkdir(parents=True, exist_ok=True)
            with options.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**facts, "work": name, "title": work.title, **rates, "rows": shown}) + "\n")
        del rows
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
