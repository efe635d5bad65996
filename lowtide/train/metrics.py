"""metrics.jsonl: one line a step."""

import json
import statistics
from pathlib import Path
from typing import Any

from lowtide.train.files import append_line, new_file

METRICS = "metrics.jsonl"


def add_metrics(output: Path, step: int, loss: float, seconds: float, memory_bytes: int, checkpointing: str) -> None:
    """checkpointing: name of the setting at the end of the step. Raises MachineError where the disk failed."""
    entry = {"step": step, "loss": loss, "seconds": seconds, "memory_bytes": memory_bytes}
    append_line(output / METRICS, {**entry, "checkpointing": checkpointing})


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """One entry a step, in order. A last line that a crash cut off is left out."""
    path = output / METRICS
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_metrics(output: Path, step: int) -> None:
    """Forget what came after a step: it is about to be done again. Raises MachineError where the disk failed."""
    kept = [entry for entry in read_metrics(output) if entry["step"] <= step]
    with new_file(output / METRICS) as partial:
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def summary_of(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last loss, the usual pace, and the most memory seen at the end of a step."""
    return {
        "first_loss": metrics[0]["loss"],
        "last_loss": metrics[-1]["loss"],
        "median_step_seconds": statistics.median(entry["seconds"] for entry in metrics),
        "most_memory_bytes": max(entry["memory_bytes"] for entry in metrics),
    }
