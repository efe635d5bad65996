"""What a run leaves for people: report.json, and the tables made from it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.errors import ConfigError
from lowtide.keys import AUTO, shown
from lowtide.train.config import HARMLESS, LATEST, START_AFRESH, TrainConfig, changes, same_numbers
from lowtide.units import format_bytes

REPORT = "report.json"
PLAN = "plan.json"
"""Which ``auto`` has come to."""
WEIGHTS = {"lora": "lora", "full": "transformer"}
"""Folder in ``output_dir`` for the trained weights, by ``model_type``."""
_BAR_WIDTH = 6
_TITLE = "What each setting does with this model and the largest batch of this data"
_ON_CPU = " on CPU: what waits in CPU memory instead."
_LEGEND = (
    "▶ ran here; the receipt above is of the last batch, which may be a smaller one. kept: activations that wait for "
    "backward, those outside the blocks too. at most: those and the largest piece that is recomputed at once. (ffn): "
    "only the feed-forward side of the blocks. Weights, gradients and optimizer come on top, the same in every row. "
    "Every row learns exactly the same; less memory costs time, nothing else."
)


def read_report(output: Path) -> dict[str, Any] | None:
    """The report of a finished run in ``output``, or None. Raises ConfigError for one that cannot be read."""
    path = output / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Move it away to train on") from error
    if not isinstance(report, dict) or not {"steps", "config"} <= report.keys():
        raise ConfigError(f"{path} is no report: it holds {shown(report)}. Move it away to train on")
    return report


def finished(config: TrainConfig) -> dict[str, Any] | None:
    """The report of the run that this configuration asks for, if it is done already: with other keys perhaps, but to
    the same numbers. Loads nothing slow.

    Raises ConfigError where ``output_dir`` holds a finished run of other numbers.
    """
    keys = config.keys
    report = read_report(keys.output)
    if report is None or keys.resume_from_checkpoint != LATEST or report["steps"] < keys.max_train_steps:
        return None
    changed = changes(report["config"], config, without=same_numbers(keys))
    if changed:
        raise ConfigError(
            f"{keys.output} holds a finished run of {report['steps']} steps with {changed}. Choose another place "
            f"(--set output_dir=…), or {START_AFRESH}. What may change in a run that goes on, docs/train.md says; it "
            "goes on with a larger max_train_steps"
        )
    return report


def differently(report: Mapping[str, Any], config: TrainConfig) -> str:
    """In words, with which keys a finished run ran otherwise than the configuration says; empty: with none."""
    return changes(report["config"], config, without=HARMLESS)


def compare_blocks(expected: list[str], receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks that the schedule recomputes beside those that the receipt says were."""
    ran = [block["name"] for block in receipt["blocks"] if block["recompute_calls"]]
    return {"expected": expected, "receipt": ran, "as_expected": set(expected) == set(ran)}


def result_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What was learned, whether the schedule was kept, and where everything is."""
    loss, summary, blocks = report["fixed_batch_loss"], report["summary"], report["recomputed_blocks"]
    yield (
        f"Learned: loss on a fixed batch {loss['before']:.4f} → {loss['after']:.4f} "
        f"({-100 * loss['improvement']:+.1f} %) in {report['steps']} steps of {summary['median_step_seconds']:.2f} s"
    )
    if blocks["as_expected"] and report["checkpointing"] == AUTO:
        yield f"Recomputed: {len(blocks['receipt'])} blocks in the last step, exactly those of the plan that auto chose"
        if "plan" not in report["files"]:
            yield "auto was still measuring, so no plan is written: a longer run comes to one (docs/auto.md says when)"
    elif blocks["as_expected"]:
        yield f"Recomputed: {len(blocks['receipt'])} blocks in each step, exactly those that the setting asks for"
    else:
        yield (
            f"Recomputed: {len(blocks['receipt'])} blocks, but the setting asks for {len(blocks['expected'])}: "
            "the receipt says why"
        )
    for entry in report.get("out_of_memory", ()):
        after = f"went on with {entry['next']}" if entry["next"] != entry["failed"] else "was planned anew for less"
        yield f"Out of memory in step {entry['step']} with {entry['failed']}: {after}"
    for what, path in report["files"].items():
        yield f"{what.capitalize()}: {path}"


def settings_table(report: Mapping[str, Any]) -> RenderableType:
    """What each setting keeps in memory and recomputes for this model and batch."""
    settings = report["settings"]
    if settings is None:
        return "No table of settings: a forward without checkpointing does not fit in this device's memory."
    most = max(entry["most_bytes"] for entry in settings)
    table = Table(title=_TITLE, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("setting", no_wrap=True)
    offload = any(entry.get("cpu_bytes") for entry in settings)
    for name in ("kept", *(["on CPU"] if offload else []), "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("recomputed", no_wrap=True)
    for entry in settings:
        share = entry["most_bytes"] / most
        table.add_row(
            ("▶ " if entry["ran"] else "  ") + setting_name(entry["keys"]),
            format_bytes(entry["held_bytes"]),
            *([format_bytes(entry["cpu_bytes"])] if offload else []),
            format_bytes(entry["most_bytes"]),
            "█" * max(1, round(_BAR_WIDTH * share)),
            _recomputed(entry),
            style="bold" if entry["ran"] else None,
        )
    return Group(Text(), table, Text(_LEGEND + (_ON_CPU if offload else "")))


def setting_name(keys: Mapping[str, Any]) -> str:
    """``torch, interval 2, stride 4``."""
    if keys.get("gradient_checkpointing_schedule"):
        return f"plan {Path(keys['gradient_checkpointing_schedule']).name}"
    words = ["off" if keys.get("gradient_checkpointing") is False else keys["gradient_checkpointing_backend"]]
    for key, word in (("interval", "interval"), ("segment_stride", "stride")):
        value = keys.get(f"gradient_checkpointing_{key}")
        words += [f"{word} {value}"] if value is not None else []
    words += ["attention offload"] if keys.get("gradient_checkpointing_offload_attention") else []
    return ", ".join(words)


def _recomputed(entry: Mapping[str, Any]) -> str:
    if entry["scope"] is None:
        return "nothing"
    unit = "(ffn)" if entry["scope"] == "ffn" else "blocks"
    return f"{entry['recomputed']} of {entry['blocks']} {unit}"
