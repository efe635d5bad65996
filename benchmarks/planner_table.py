"""What ``benchmarks/planner.py`` measured, as Markdown tables: ``auto`` beside the quickest setting that fits.

    python benchmarks/planner_table.py results/planner.jsonl

A setting fits where what PyTorch reserved under it is no more than the budget. ± are a peak over its prediction: of the
first step, from shapes alone, and of the steps under the schedule that stayed, over what was predicted before it first
ran (lines of commits before this was kept have no such figure). In turns: both once more, one after the other, which
the last lines of a work have from a later commit on. Lines of one work and one process belong together.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

from lowtide.keys import AUTO
from lowtide.units import format_bytes

KEPT_BYTES = "kept bytes"
IN_TURNS = "in turns"
"""Names of lines that are no settings."""
_HEAD = (
    "| budget | auto reserved | cold | settled | auto | quickest that fits | time over | in turns | predicted |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)

Line = dict[str, Any]


def runs(lines: Iterable[Line]) -> dict[str, dict[tuple[str, int | None], Line]]:
    """The last line of every setting and budget, by work, sizes, commit and when its process began."""
    found: dict[str, dict[tuple[str, int | None], Line]] = {}
    for line in lines:
        sizes = ", ".join(f"{name} {size}" for name, size in line.get("sizes", {}).items())
        machine = line["machine"]
        name = f"{line['work']}{f' ({sizes})' * bool(sizes)}, commit {machine['commit']}, {machine['date']}"
        found.setdefault(name, {})[line["setting"], line.get("budget_bytes")] = line
    return found


def rows(settings: Iterable[Line]) -> Iterator[str]:
    settings = list(settings)
    turns = {line["budget_bytes"]: line for line in settings if line["setting"] == IN_TURNS}
    for line in settings:
        if line["setting"] == AUTO and ("failed" in line or "peak_bytes" in line):
            yield row(line, quickest(settings, line["budget_bytes"]), turns.get(line["budget_bytes"]))


def quickest(settings: Iterable[Line], budget_bytes: int) -> Line | None:
    """Of the others, that fit; None: none does."""
    able = (line for line in settings if line["setting"] != AUTO and "reserved_bytes" in line)
    fitting = [line for line in able if line["reserved_bytes"] <= budget_bytes]
    return min(fitting, key=lambda line: line["step_s"], default=None)


def kept_totals(line: Line) -> tuple[int, int]:
    """Bytes of all blocks, by forecast and by probe."""
    forecast, probed = (sum(map(sum, line[key].values())) for key in ("forecast_bytes", "probed_bytes"))
    return forecast, probed


def kept(settings: Iterable[Line]) -> Iterator[str]:
    """How well forecasts of kept bytes hold, where they were measured."""
    for line in settings:
        if line["setting"] == KEPT_BYTES:
            forecast, probed = kept_totals(line)
            yield f"\nBlocks of a plain step keep {format_bytes(probed)}, the forecast {forecast / probed - 1:+.2%}."


def row(line: Line, best: Line | None, turns: Line | None) -> str:
    beside = "none" if best is None else f"{best['setting']} {1e3 * best['step_s']:.0f} ms"
    budget = format_bytes(line["budget_bytes"])
    if "failed" in line:
        return f"| {budget} | {line['failed'].splitlines()[0][:90]} | | | | {beside} | | | |"
    cold = line["cold"]["peak_bytes"] / line["cold"]["predicted_bytes"] - 1
    settled = f"{line['peak_bytes'] / line['predicted_bytes'] - 1:+.1%}" if "known_bytes" in line else "–"
    over = "" if best is None else f"{line['step_s'] / best['step_s'] - 1:+.1%}"
    again = "–" if turns is None else f"{turns['auto_step_s'] / turns['other_step_s'] - 1:+.1%}"
    return (
        f"| {budget} | {format_bytes(line['most_reserved_bytes'])} | {cold:+.1%} | {settled} | "
        f"{1e3 * line['step_s']:.0f} ms | {beside} | {over} | {again} | {line['predicted_ms']:.0f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=argparse.FileType(encoding="utf-8"))
    text = parser.parse_args().file.read()
    for run, settings in runs(map(json.loads, text.splitlines())).items():
        ran = sum(
            line["setting"] not in (AUTO, KEPT_BYTES, IN_TURNS) and "reserved_bytes" in line
            for line in settings.values()
        )
        print(f"\n{run}; {ran} settings beside auto\n")
        print(*_HEAD, *rows(settings.values()), *kept(settings.values()), sep="\n")


if __name__ == "__main__":
    main()
